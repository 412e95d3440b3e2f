"""When to drop: a policy looks at a stream and names what shall go now.

    session.apply(InTurn(DropRepeats(), LastNObservations(5, polling=3)), note=True)

Pure, over `akv_sdk.types` alone. `context` is what policies see and the guard that all pass, `observations` and `edits`
hold the policies, `summarise` decides between dropping and rewriting. Sessions do what these say.
"""

from akv_sdk.policies.context import Context, Drop, Policy, Target, decide
from akv_sdk.policies.edits import ClearToolUsesEdit, ContextEdits, DropThinking
from akv_sdk.policies.observations import DropRepeats, InTurn, LastNObservations, RollingDrop
from akv_sdk.policies.summarise import CacheOrSummarise, Decision, Summariser, Summary, summariser

__all__ = [
    "CacheOrSummarise",
    "ClearToolUsesEdit",
    "Context",
    "ContextEdits",
    "Decision",
    "Drop",
    "DropRepeats",
    "DropThinking",
    "InTurn",
    "LastNObservations",
    "Policy",
    "RollingDrop",
    "Summariser",
    "Summary",
    "Target",
    "decide",
    "summariser",
]
