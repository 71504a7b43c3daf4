"""`swarm charter new | check | show`: the rules of a swarm, drafted for models and tasks, tried, and read.

`new` writes rules and signs nothing: a swarm begins when it is founded, with the pins of the machine and the
key of the home that found it, and `swarm run -c FILE.toml` does that, one way for all rules. The signed
charter is then `<home>/charter.bin`: others get it with `swarm join`, or as a file. What is measured,
proposed, written and found lies in `node/open`; here are options, progress and what is printed.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from protocol.errors import CharterError, ConfigError, RemoteProtocolError, SwarmError
from swarm_cli.commands.consent import agree
from swarm_cli.commands.run import TrustOption
from swarm_cli.options import HomeOption, JsonOption, Settings, resolve
from swarm_cli.output import err, out, write_json

if TYPE_CHECKING:
    from node.config import NodeConfig
    from node.environment.host import TaskHost
    from node.open.examine import Finding
    from node.open.propose import Sample
    from node.open.sample import Asking, Progress
    from node.rollout.policy import Policy
    from protocol.messages import Charter

__all__ = ["app"]

REFUSED = 2
MOST_SHOWN = 1000
"""Characters of a line."""

app = typer.Typer(no_args_is_help=True)


@app.command()
def new(
    model: Annotated[list[str], typer.Option("--model", help="A policy, as in policy.path; repeatable.")],
    env: Annotated[
        list[str],
        typer.Option("--env", help='A task, as ./riddle.py or reasoning_gym/chain_sum:{"max_terms":2}.'),
    ],
    name: Annotated[
        str | None, typer.Option("--name", help="Of the swarm; else by model and task.", show_default=False)
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--out", help="A file that is not there yet; else NAME.toml.")
    ] = None,
    sample: Annotated[
        int, typer.Option(min=0, max=256, help="Questions of each task to measure with; 0: none.")
    ] = 10,
    max_tokens: Annotated[int, typer.Option(min=1, max=2048, help="Most tokens of an answer.")] = 256,
    within_s: Annotated[
        float, typer.Option("--within", min=1, help="Seconds of sampling with each model, at most.")
    ] = 120.0,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Draft the rules of a swarm from models and tasks: digests, end tokens and words as in the folders,
    lengths and windows by answers that the models give now. Found it with `swarm run -c FILE.toml`.

    Exit codes: 0 written, 1 a model or the sandbox failed, 2 refused.
    """
    from node.open.draft import environment_of, model_name, model_rows, rules_text, tokenizer_rows
    from node.open.propose import propose, warnings
    from node.open.sample import Asking
    from node.rollout.policy import Policy

    config = resolve(None, None, home)
    folders = [_folder(config, each) for each in model]
    beside = file.parent if file is not None else Path()
    environments = [environment_of(text, beside) for text in env]
    first = environments[0].get("name") or Path(environments[0]["file"]).stem
    swarm = name or model_name(Path(f"{folders[0].name}-{first.rpartition('/')[2]}"))
    target = file or Path(f"{swarm}.toml")
    _require_new(target)
    policies = [Policy.open(folder) for folder in folders]
    rows = {
        "environments": environments,
        "tokenizers": tokenizer_rows(policies),
        "models": model_rows(policies),
    }
    run = _command(config, target, folders[0])
    write = functools.partial(rules_text, swarm, rows=rows, run=run)
    # Names and configs first, since measuring takes its time.
    draft = _drafted(config, write(propose([], max_tokens)), beside)
    asking = Asking(questions=sample, max_tokens=max_tokens, within_s=within_s)
    samples = _measured(config, draft, policies, asking)
    choices = propose(samples, max_tokens)
    text = write(choices, samples=samples)
    _drafted(config, text, beside)
    for warning in warnings(samples):
        err.print(f"warning: {warning}")
    _write(config, target, text)
    if json:
        write_json({"file": str(target), "name": swarm, "choices": choices, "samples": samples})
    else:
        for key, choice in choices.items():
            out.print(f"{key} = {choice.value}: {choice.why}", soft_wrap=True)
    err.print(f"written to {target}; read it, then: {run}")


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="Rules (.toml), or a signed charter.")],
    setting: Settings = None,
    trust: TrustOption = None,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Say everything that founding a swarm with these rules, or joining the one of this charter, would say.
    Opens its tasks in the sandbox.

    Exit codes: 0 it may be founded or joined, 2 refused.
    """
    from node.open.charter import inspect_charter
    from node.open.examine import Finding, examine

    config = resolve(None, setting, home, charter=str(file))
    founding = file.suffix == ".toml"
    findings: list[Finding] = []
    try:
        path, charter = inspect_charter(config)
        if not founding:
            agree(charter, trusted=trust or (), yes=True)
        findings += examine(config, charter, founding=founding)
    except SwarmError as error:
        findings.append(Finding(True, str(error)))
    refused = any(finding.refused for finding in findings)
    if json:
        write_json({"file": str(file), "refused": refused, "findings": findings})
    else:
        _tell(findings)
        if not refused:
            done = f"swarm {charter.name} may be {'founded' if founding else 'joined'}"
            out.print(f"ok      {done} ({path})", soft_wrap=True)
    if refused:
        raise typer.Exit(REFUSED)


@app.command()
def show(
    file: Annotated[
        Path | None, typer.Argument(help="Rules or a signed charter; else this home's.", show_default=False)
    ] = None,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Show a charter: tasks with configs and pins, tokenizers, models, sampling, windows, founder, id, and
    whether its signature holds.

    Exit codes: 0 shown, 2 there is none, or its signature does not hold.
    """
    from node.events import inert

    charter, signature, problem = _read(resolve(None, None, home), file)
    if json:
        write_json(_facts(charter, signature))
    else:
        for what, text in _lines(charter, signature):
            out.print(f"{what:10} {inert(text, MOST_SHOWN)}", soft_wrap=True)
    if problem:
        raise CharterError(problem)


# --- new ----------------------------------------------------------------------------------------------------


def _require_new(target: Path) -> None:
    """Raise ConfigError, before anything is measured, for a file that could not be written, or not be read as
    rules."""
    if target.suffix != ".toml":
        raise ConfigError(f"--out {target} must end in .toml, by which rules are told from signed charters")
    if target.exists():
        raise ConfigError(f"{target} exists and is not overwritten; give another --out, or move it away")
    if not target.parent.is_dir():
        raise ConfigError(f"there is no folder {target.parent} for --out {target.name}; make it first")


def _folder(config: NodeConfig, model: str) -> Path:
    """The folder of a policy. Raises ConfigError when it is nowhere."""
    return config.policy.model_copy(update={"path": model}).folder(config.home)


def _command(config: NodeConfig, target: Path, folder: Path) -> str:
    """What founds the swarm of `target` and trains the policy in `folder`."""
    from node.open.draft import model_name

    command = f"swarm run -c {shlex.quote(str(target))}"
    with suppress(ConfigError):
        if _folder(config, model_name(folder)) == folder:
            return command
    return f"{command} --set policy.path={shlex.quote(str(folder))}"


def _drafted(config: NodeConfig, text: str, folder: Path) -> Charter:
    """The charter of rules that will lie in `folder`, with a founder who does not exist. Raises CharterError,
    ConfigError."""
    from node.open.charter import packed_rules
    from node.state.paths import Home
    from protocol.charter import found
    from protocol.identity import Identity

    return found(Identity.generate(), packed_rules(text, folder, Home(config.home)), 0)


def _measured(config: NodeConfig, draft: Charter, policies: Sequence[Policy], asking: Asking) -> list[Sample]:
    """What each policy does on the draft's tasks, which are refused where founding would refuse them."""
    from node.open.charter import worthless_tasks
    from node.open.policy import open_host, require_fit

    err.print("opening the tasks in the sandbox")
    with open_host(config, draft) as host:
        require_fit(host)
        for refused, text in worthless_tasks(host, draft):
            if refused:
                raise CharterError(text)
            err.print(f"warning: {text}")
        tasks = [spec.name for spec in draft.environments]
        return [_sampled(config, policy, host, tasks, asking) for policy in policies if asking.questions]


def _sampled(
    config: NodeConfig, policy: Policy, host: TaskHost, tasks: Sequence[str], asking: Asking
) -> Sample:
    from contextlib import closing

    from node.open.sample import open_sampler, sample_policy

    told = f"{asking.questions} questions of each task, for {asking.within_s:g} s at most"
    err.print(f"{policy.path.name} answers {told}")
    with closing(open_sampler(config, policy, asking)) as engine, _progress() as progress:
        return sample_policy(policy, engine, host, tasks, asking, progress)


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on stderr; silent where that is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("answers that ended"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda ended, of: bar.update(task, completed=ended, total=of)


def _write(config: NodeConfig, target: Path, text: str) -> None:
    """The rules, and in the home that these are the ones to found next."""
    from node.state.paths import Home
    from node.state.stores import write_atomically

    try:
        with target.open("x", encoding="utf-8") as stream:
            stream.write(text)
        write_atomically(Home(config.home).create().rules, f"{target.absolute()}\n".encode())
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename or target}: {error.strerror}") from None


# --- check and show -----------------------------------------------------------------------------------------


def _tell(findings: Sequence[Finding]) -> None:
    from node.events import inert

    for finding in findings:
        text = inert(" ".join(finding.text.split()), MOST_SHOWN)
        out.print(f"{'REFUSED' if finding.refused else 'note':7} {text}", soft_wrap=True)


def _read(config: NodeConfig, file: Path | None) -> tuple[Charter, str, str]:
    """The charter, "valid", "invalid" or "none" of its signature, and what is wrong with it, if anything."""
    from node.open.charter import inspect_charter
    from node.state.paths import Home
    from protocol.charter import MAX_CHARTER_BYTES
    from protocol.codec import decode
    from protocol.messages import Charter

    path = file or Home(config.home).charter
    if file is None and not path.exists():
        raise ConfigError(
            f"there is no charter in {config.home} yet; swarm run founds one, swarm join gets one"
        )
    config = config.model_copy(update={"charter": str(path)})
    try:
        found_at, charter = inspect_charter(config)
    except CharterError as error:
        if path.suffix == ".toml" or not path.is_file():
            raise
        try:
            return decode(path.read_bytes(), Charter, max_bytes=MAX_CHARTER_BYTES), "invalid", str(error)
        except RemoteProtocolError:
            raise error from None
    return charter, "none" if found_at.suffix == ".toml" else "valid", ""


def _facts(charter: Charter, signature: str) -> dict[str, Any]:
    """What `--json` prints: the charter with its configs as objects."""
    import msgspec

    from protocol.charter import swarm_id

    facts: dict[str, Any] = msgspec.to_builtins(charter)
    if signature != "invalid":  # nobody has looked at its configs
        for row in facts["environments"]:
            row["config"] = msgspec.json.decode(row["config"])
    founded = signature != "none"
    facts |= {"signature": signature, "id": swarm_id(charter) if founded else None}
    return facts if founded else facts | {"founder": None, "created_at": None}


def _lines(charter: Charter, signature: str) -> Iterator[tuple[str, str]]:
    """What is there and what it says, one line each."""
    from protocol.charter import swarm_id

    yield "swarm", f"{charter.name}, {'closed' if charter.closed else 'open to everybody'}"
    if signature == "none":
        yield "founder", "none yet: these are rules, that swarm run -c founds a swarm with"
    else:
        yield "id", swarm_id(charter)
        yield "founder", f"{charter.founder}, {_day(charter.created_at)}"
        yield "signature", signature
    for spec in charter.environments:
        yield "task", f"{spec.name} {spec.config}, weight {spec.weight}, {spec.pin or 'not pinned'}"
    for each in charter.tokenizers:
        ends = ", ".join(map(str, each.end_token_ids))
        yield "tokenizer", f"{each.name} ({each.digest[:12]}), {each.vocab_size} words, ends with {ends}"
    for model in charter.models:
        yield "model", f"{model.name} ({model.digest[:12]}), {model.source}"
    for recipe in charter.recipes:
        rate = f"learning rate {recipe.learning_rate:g}, {recipe.warmup_steps} steps of warm-up"
        yield "recipe", f"up to {recipe.max_params:,} parameters: {recipe.objective}, {rate}"
    top_p = f", top-p {charter.top_p:g}" if charter.top_p < 1 else ""
    answers = f"{charter.group_size} answers of at most {charter.max_new_tokens} tokens to a question"
    yield "sampling", f"{answers}, temperature {charter.temperature:g}{top_p}"
    slots = f"{charter.slots_per_window} slots of {charter.pool_size} prompts of {charter.universe_size}"
    missing = f"{charter.max_skip_share:.0%} of the slots may be missing"
    yield "windows", f"{charter.window_ms / 1000:g} s, {slots}; {missing}"
    rules = charter.rules
    stale = f"stale after {rules.max_age_windows} windows or {rules.max_policy_lag} versions"
    gap = f"at most {rules.max_logprob_gap:g} nats a token"
    yield "rules", f"{stale}; {gap}; receipts for {charter.receipt_windows} windows"


def _day(at_ms: int) -> str:
    """A time as people write it; the number itself where the calendar ends before."""
    from datetime import UTC, datetime

    try:
        return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d %H:%M} UTC"
    except (ValueError, OverflowError, OSError):
        return f"at {at_ms} ms"
