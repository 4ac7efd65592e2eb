"""A stage that does not exist is refused with the nearest name and all others."""

from __future__ import annotations

import pickle

import pytest

from specgraph import SpecgraphError, UnknownStageError
from specgraph.specialise.step_cache import Stages
from tests.decoding import compiled
from tests.models import shared_model


def test_a_wrong_stage_of_a_decoder_names_the_nearest_and_all() -> None:
    stages = compiled(shared_model("llama"), "none").stages
    with pytest.raises(KeyError) as error:
        stages["insert_verfy"]
    assert str(error.value) == (
        f"There is no stage 'insert_verfy' (did you mean 'insert_verify'?); there are {', '.join(stages)}."
    )
    assert isinstance(error.value, SpecgraphError) and "trace, expose_features" in str(error.value)
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_all_else_is_as_with_any_dictionary() -> None:
    stages = Stages()
    assert stages.get("trace") is None and "trace" not in stages and stages == {}
    with pytest.raises(UnknownStageError):
        stages[0]  # type: ignore[index]
    with pytest.raises(KeyError):
        stages.pop("trace")
