"""The file of a fitted profile: what is written is read, and what is broken is said, with its field."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forebay.engines.simulated.catalog import profile_named
from forebay.engines.simulated.fitted import Coefficient, Fitted, FrontEnd, Residuals, read_fitted, write_fitted
from forebay.engines.simulated.model import EngineLimits
from forebay.engines.simulated.profile import StepProfile
from forebay.errors import UsageError


def content() -> Fitted:
    profile = profile_named("h100-80g/llama-3.1-8b/bf16/tp1/trtllm")
    assert isinstance(profile, StepProfile)
    return Fitted(
        fitted_from="a test",
        profile=profile,
        limits=EngineLimits(8, 128, 1000, max_mixed_tokens=64),
        front=FrontEnd(2.0, 0.001),
        coefficients=[Coefficient("c0", 1.0, 0.1, True, "")],
        residuals=Residuals(10, 0.01, 0.02, 0.01, 0.02),
    )


def broken(path: Path, change: Any) -> Path:
    write_fitted(path, content())
    data = json.loads(path.read_bytes())
    change(data)
    path.write_text(json.dumps(data))
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    write_fitted(path, content())
    assert read_fitted(path) == content()
    assert profile_named(str(path)) == content().profile


def test_a_curve_takes_the_place_of_the_roofline() -> None:
    curved = replace(content().profile, curve=((1, 10.0), (8, 24.0), (16, 24.0), (32, 56.0)), seq=0.5, kv=2.0, att=0.0)
    assert curved.step_ms(1, 1, 0, 0.0) == pytest.approx(10.5)
    assert curved.step_ms(4, 4, 500, 0.0) == pytest.approx(10 + 6 + 2 + 1)
    assert curved.step_ms(12, 0, 0, 0.0) == pytest.approx(24)
    assert curved.step_ms(16, 0, 0, 0.0) == pytest.approx(24)
    assert curved.step_ms(64, 0, 0, 0.0) == pytest.approx(120)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda d: d["profile"].update(r=-1.0), "profile.r is -1.0: it must be a number of at least 0"),
        (lambda d: d["profile"].update(p=0.5), "profile.p is 0.5: it must lie within 1 and 64"),
        (lambda d: d["profile"].update(c0=0.0, w=0.0, r=0.0, e=0.0, seq=0.0, kv=0.0), "takes no time"),
        (lambda d: d["profile"].pop("kv"), "missing required field `kv`"),
        (lambda d: d["profile"].update(c0="fast"), "Expected `float`, got `str` - at `$.profile.c0`"),
        (lambda d: d["limits"].update(max_num_seqs=0), "max_num_seqs must be at least 1"),
        (lambda d: d["front"].update(fixed_ms=-2), "front.fixed_ms is -2"),
        (lambda d: d["profile"].update(curve=[[1, 5.0]]), "profile.curve has one point"),
        (lambda d: d["profile"].update(curve=[[1, 5.0], [4, 3.0]]), "profile.curve[1]: tokens must grow"),
        (lambda d: d["profile"].update(curve=[[4, 1.0], [4, 3.0]]), "profile.curve[1]: tokens must grow"),
        (lambda d: d.update(kind="other"), "Invalid enum value 'other'"),
    ],
)
def test_a_broken_file_is_refused_with_its_field(tmp_path: Path, change: Any, told: str) -> None:
    path = broken(tmp_path / "mine.json", change)
    with pytest.raises(UsageError) as caught:
        read_fitted(path)
    assert str(path) in str(caught.value)
    assert told in str(caught.value)


def test_no_file_and_no_json_are_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read as a profile: No such file"):
        profile_named(str(tmp_path / "none.json"))
    (tmp_path / "text.json").write_text("c0 = 5")
    with pytest.raises(UsageError, match="not a profile that `forebay sim calibrate` wrote"):
        profile_named(str(tmp_path / "text.json"))
