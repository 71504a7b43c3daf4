"""The numbers of the last step and of the process, as label and value in columns."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text
from textual.events import Resize
from textual.widgets import Static

from node.events import Health, StepDone
from swarm_cli.dashboard.text import BAD, DIM, WARN, decimal, duration, quantity
from swarm_cli.dashboard.view import NodeView

__all__ = ["Facts", "facts_of"]

COLUMN_CELLS = 25
Fact = tuple[str, str, str]


class Facts(Static):
    """As many facts as fit, the most telling first."""

    BORDER_TITLE = "last step"

    _facts: tuple[Fact, ...] = ()

    def show(self, view: NodeView) -> None:
        """Draw the newest step and health of `view`."""
        facts = facts_of(view)
        if facts != self._facts:
            self._facts = facts
            self._draw()

    def on_resize(self, event: Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        if not self._facts:
            self.update(Text("waiting for the first step", DIM))
            return
        columns = max(1, self.size.width // COLUMN_CELLS)
        rows = max(1, self.size.height)
        shown = self._facts[: columns * rows]
        rows = min(rows, -(-len(shown) // columns))
        grid = Table.grid(expand=True, padding=(0, 2))
        for _ in range(columns):
            grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        for row in range(rows):
            grid.add_row(*(_cell(*fact) for fact in shown[row::rows]))
        self.update(grid)


def facts_of(view: NodeView) -> tuple[Fact, ...]:
    """Label, value and style of everything there is to say, the most telling first."""
    step = _of_step(view.steps[-1] if view.steps else None)
    return (*step, *_of_weights(view), *_of_health(view.health))


def _cell(label: str, value: str, style: str) -> Table:
    cell = Table.grid(expand=True)
    cell.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    cell.add_column(justify="right", no_wrap=True)
    cell.add_row(Text(label, DIM), Text(value, style))
    return cell


def _of_step(step: StepDone | None) -> tuple[Fact, ...]:
    if step is None:
        return ()
    tokens = sum(source.tokens for source in step.sources)
    return (
        ("policy version", f"v{step.policy_version}", "bold"),
        ("groups own+peers", f"{step.groups_local}+{step.groups_external}", ""),
        ("tokens", quantity(tokens), ""),
        ("staleness", f"{decimal(step.staleness)} versions", ""),
        ("age", f"{decimal(step.age_windows)} windows", ""),
        ("replay pool", quantity(step.pool), ""),
        ("entropy", f"{decimal(step.entropy, 3)} nat", ""),
        ("kl to start", f"{decimal(step.kl_start, 3)} nat", ""),
        ("zero variance", f"{decimal(100 * step.zero_variance_share, 0)} %", ""),
        ("generate", duration(step.generate_s), ""),
        ("train", duration(step.train_s), ""),
        ("wait", duration(step.wait_s), ""),
        ("reward of peers", decimal(step.reward_external, 3), ""),
        ("length", f"{decimal(step.length_mean, 1)} tok", ""),
        ("finished", f"{decimal(100 * step.finished_share, 0)} %", ""),
        (
            "gradient norm",
            "skipped" if step.skipped else "rolled back" if step.rolled_back else decimal(step.grad_norm),
            BAD if step.skipped or step.rolled_back else "",
        ),
        ("learning rate", f"{step.learning_rate:.1e}", ""),
        ("shared prompts", str(step.prompts_shared), ""),
        ("hacpo+graft", f"{step.hacpo_groups}+{step.graft_groups}", ""),
        ("off-policy", f"{decimal(100 * step.off_policy_share, 0)} % of own", ""),
        *(
            (("of followers", f"{step.groups_followers}, {decimal(step.staleness_followers, 1)} behind", ""),)
            if step.groups_followers
            else ()
        ),
    )


def _of_weights(view: NodeView) -> tuple[Fact, ...]:
    weights = view.weights
    if weights is None:
        return ()
    version = f"v{weights.policy_version}" if weights.policy_version >= 0 else "none yet"
    moved = ("weights in+out", f"{quantity(weights.received_bytes)}+{quantity(weights.sent_bytes)}B", "")
    if view.role == "trainer":
        return (("followers", str(weights.followers), ""), ("published", version, ""), moved)
    fetching = " ".join(f"{blob.have}/{blob.chunks}" for blob in weights.blobs) or "nothing"
    behind = max(0, weights.head - weights.policy_version)
    return (
        (
            "follows",
            view.name_of(weights.owner) if weights.owner else "nobody",
            "" if weights.owner else WARN,
        ),
        ("generates with", version, "bold"),
        ("behind its owner", f"{behind} versions", ""),
        ("fetching chunks", fetching, ""),
        moved,
    )


def _of_health(health: Health | None) -> tuple[Fact, ...]:
    if health is None:
        return ()
    refused = sum(health.refused.values())
    return (
        ("memory", f"{quantity(health.rss_bytes)}B", ""),
        (
            "loop lag p99",
            f"{health.loop_lag_p99_s * 1000:.0f} ms",
            WARN if health.loop_lag_p99_s > 0.1 else "",
        ),
        ("announced", quantity(health.announced), ""),
        ("bodies in+out", f"{quantity(health.bodies_fetched)}+{quantity(health.bodies_served)}", ""),
        ("refused early", quantity(refused), WARN if refused else ""),
        ("restarts", f"{health.transport_restarts}+{health.sandbox_restarts}", ""),
        *((("sharing", "stopped", WARN),) if health.not_sharing else ()),
    )
