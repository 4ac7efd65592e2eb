"""Tests of drafters. What every drafter has to hold is in classes that its test file derives from."""

import pytest

pytest.register_assert_rewrite("tests.drafters.contract", "tests.drafters.files_contract",
                               "tests.drafters.training_contract")  # fmt: skip
