"""Advantages from group statistics: how much better than expected each rollout of one prompt was.

For: turning re-scored rewards (plain floats) into the numbers that multiply the policy gradient: inside one
group (`ADVANTAGES`), or across unlike policies that answered the same prompt (`capability_aware`, fed by a
`CapabilityTracker`). Several rewards of a rollout are added up by the task before they come here. Not for:
claimed rewards, which are never used; nor for trust, staleness or ratios, which weigh a rollout elsewhere. A
group whose rewards are all alike teaches nothing: all zeros. One file per family; `registry` lists all of
them with source and evidence.
"""
