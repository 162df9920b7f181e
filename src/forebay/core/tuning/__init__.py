"""Queue-depth tuners: how many may wait, found while it runs. One file each."""

from __future__ import annotations

from forebay.core.tuning.derived import Derived, DerivedConfig
from forebay.core.tuning.fixed import Fixed, FixedConfig
from forebay.core.tuning.stepwise import Stepwise, StepwiseConfig
from forebay.core.tuning.tuner import DepthTuner

TunerConfig = FixedConfig | StepwiseConfig | DerivedConfig

POLICIES: dict[str, type[Fixed | Stepwise | Derived]] = {
    "fixed": Fixed,
    "stepwise": Stepwise,
    "derived": Derived,
}


def build(config: TunerConfig) -> DepthTuner:
    """The tuner that a config asks for."""
    if isinstance(config, DerivedConfig):
        return Derived(config)
    if isinstance(config, StepwiseConfig):
        return Stepwise(config)
    return Fixed(config)
