"""What every drafter with checkpoints has to hold: misfits, files that are loaded and saved, and the commands."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import specgraph
from specgraph.bench import run as bench_run
from specgraph.cli import main
from specgraph.config import DraftConfig
from specgraph.drafters.base import DraftHead
from specgraph.drafters.heads import HeadDrafter
from specgraph.drafters.registry import open_checkpoint
from specgraph.errors import ConfigError
from tests.checkpoints.layouts import Written
from tests.checkpoints.running import info
from tests.decoding import CONFIG
from tests.drafters.contract import Contract, DraftContract
from tests.models import exact_norms


def shown_by_inspect(capsys: pytest.CaptureFixture[str], folder: Path, target: Path, *options: str) -> list[list[str]]:
    """The cells of every line that ``inspect`` prints."""
    assert main(["inspect", str(folder), f"target={target}", *options]) == 0
    return [[cell.strip() for cell in row.split("  ") if cell] for row in capsys.readouterr().out.splitlines()]


class FilesContract(Contract):
    """Checkpoints of a drafter. ``DRAFTS`` is its class of :class:`DraftContract`."""

    ARGUMENTS: ClassVar[Mapping[str, str]] = {"misfit": "MISFITS", "saved": "SAVED"}

    DRAFTS: ClassVar[type[DraftContract]]
    DRAFTER: ClassVar[type[HeadDrafter]]
    MISFITS: ClassVar[Mapping[str, tuple[Callable[[], Any], str]]]
    """Checkpoints that are refused, with what the sentence says."""
    SAVED: ClassVar[Sequence[str]]
    """Heads by name that are saved and loaded again."""
    LAYOUT: ClassVar[str]
    """The layout in which heads are saved."""
    INSPECTED: ClassVar[Sequence[Sequence[str]]]
    """Lines of ``inspect`` about :meth:`example`."""
    UNFIT: ClassVar[tuple[Callable[[], PreTrainedModel], str]]
    """Another target, and a part of the last line of ``inspect``, which says why :meth:`example` does not fit."""

    # What a drafter says

    @classmethod
    def example(cls, folder: Path) -> Path:
        """A written head without an embedding and a projection of its own."""
        raise NotImplementedError

    @classmethod
    def write_misfit(cls, made: Any, folder: Path) -> Path:
        """Write what an entry of ``MISFITS`` makes."""
        assert isinstance(made, Written)
        return made.save(folder)

    @classmethod
    def stored(cls, name: str) -> set[str]:
        """The names of the tensors that the file of a saved head holds."""
        raise NotImplementedError

    def check_saved(self, again: DraftHead, given: DraftHead) -> None:
        """What else must be equal of a head and of itself by its saved files."""

    @classmethod
    def load(cls, folder: Path, **options: Any) -> DraftHead:
        """A head by its folder, with options of the group ``draft``."""
        target, given = cls.DRAFTS.target(), cls.DRAFTER.Config(**options)
        return cls.DRAFTER.load(open_checkpoint(folder), given, target, info(target))

    @classmethod
    def choices(cls, folder: Path, layers: int | None = 4, **options: Any) -> dict[str, tuple[Any, str]]:
        """Every option of a head by its folder, with where it comes from."""
        given: DraftConfig = cls.DRAFTER.Config(**options)
        return {c.name: (c.value, c.source) for c in cls.DRAFTER.choices(open_checkpoint(folder), given, layers)}

    @classmethod
    def exact(cls, save: Callable[[Path], Path]) -> DraftHead:
        """A head by way of the files that ``save`` writes into a folder, computing in float64 throughout."""
        with tempfile.TemporaryDirectory() as folder:
            made = cls.load(save(Path(folder)))
        exact_norms(made.module)
        return made

    # Files

    def test_misfits_get_one_sentence(self, misfit: str, tmp_path: Path) -> None:
        """It says what was given, what is needed and what to do."""
        make, message = self.MISFITS[misfit]
        folder = self.write_misfit(make(), tmp_path)
        with pytest.raises(ConfigError, match=message) as caught:
            self.load(folder)
        assert "\n" not in str(caught.value) and str(caught.value).endswith(".")

    def test_what_is_saved_is_what_is_loaded(self, saved: str, tmp_path: Path) -> None:
        """Tensors, configuration, and what else a head says of itself; what is the target's is not saved."""
        given = self.DRAFTS.draft(saved)
        folder = self.DRAFTER.save_head(given, tmp_path, target_name="target", algorithm=self.DRAFTS.KIND,
                                        num_speculative_tokens=3, shared=self.DRAFTS.target().parameters())  # fmt: skip
        checkpoint = open_checkpoint(folder)
        assert (checkpoint.kind, checkpoint.layout) == (self.DRAFTS.KIND, self.LAYOUT)
        assert checkpoint.tensors.keys() == self.stored(saved)
        again = self.load(folder)
        assert (again.features, again.mask_token_id, again.parallel) == (
            given.features, given.mask_token_id, given.parallel
        )  # fmt: skip
        found, expected = (_tensors(head.module) for head in (again, given))
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
        ids = [getattr(each.module, "draft_to_target", None) for each in (again, given)]
        assert ids[0] is ids[1] is None or torch.equal(*ids)
        self.check_saved(again, given)

    def test_a_checkpoint_by_its_folder_and_the_report(self, tmp_path: Path) -> None:
        """The folder alone says which drafter runs it, and drafts change no token."""
        folder = self.example(tmp_path)
        config = {**CONFIG, "draft": {"num_speculative_tokens": 3}}
        tested = specgraph.compile_speculative(self.DRAFTS.target(), config, draft=folder)
        assert tested.stages["trace"].drafter.kind == self.DRAFTS.KIND
        assert self.DRAFTS.tokens_of(tested) == self.DRAFTS.plain_tokens()
        lines = tested.report().splitlines()
        for line in self.reported(folder):
            assert line in lines

    @classmethod
    def reported(cls, folder: Path) -> list[str]:
        """Lines of the report about :meth:`example`: its layout, and which tensors are the target's."""
        target = cls.DRAFTS.target()
        size = f"{target.get_input_embeddings().weight.nbytes:,} bytes (the checkpoint has none)"
        shared = [f"- shared while loading: draft.{name}.weight is target.{own}.weight, {size}"
                  for name, own in (("embed_tokens", "model.embed_tokens"), ("lm_head", "lm_head"))]  # fmt: skip
        return [f"- draft: {cls.DRAFTS.KIND} in the {cls.LAYOUT} layout, {folder}", *shared]

    # The commands

    def test_inspect(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """With a target that the head fits, and with one that it does not fit."""
        self.DRAFTS.target().save_pretrained(tmp_path / "target")
        cells = shown_by_inspect(capsys, self.example(tmp_path / "head"), tmp_path / "target")
        for expected in (["kind", self.DRAFTS.KIND], ["fits the target", "yes"], *self.INSPECTED):
            assert [*expected] in cells, expected
        make, sentence = self.UNFIT
        make().save_pretrained(tmp_path / "other")
        assert sentence in " ".join(shown_by_inspect(capsys, tmp_path / "head", tmp_path / "other")[-1])

    def test_bench_with_a_random_head(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two drafts for two sequences; the tensors that are read are counted."""
        monkeypatch.setattr(bench_run, "measure_bandwidth", lambda device: 1e9)
        options = ["device=cpu", "batch_sizes=[2]", "num_speculative_tokens=[2]", "steps=2", "warmup=1",
                   "prompt_length=9", "pipeline.verify=false", "debug.self_check=false"]  # fmt: skip
        written = tmp_path / "steps.json"
        assert main(["bench", "target=tiny-shape", f"draft={self.DRAFTS.KIND}", *options, f"json={written}"]) == 0
        assert f"draft               {self.DRAFTS.KIND} (random)" in capsys.readouterr().out
        (row,) = json.loads(written.read_text())["rows"]
        self.check_bench(row)

    def check_bench(self, row: dict[str, Any]) -> None:
        """What is measured of a random head."""
        assert row["draft_bytes"] > 0

    def test_the_command_that_trains_knows_the_drafter(self, capsys: pytest.CaptureFixture[str]) -> None:
        """By its name on the command line."""
        assert main(["train", f"draft={self.DRAFTS.KIND}", "--cfg", "job"]) == 0
        assert f"draft: {self.DRAFTS.KIND}\n" in capsys.readouterr().out


def check_parameters(module: torch.nn.Module, tensors: Mapping[str, Tensor], *more: str) -> dict[str, Tensor]:
    """The parameters of a loaded head, by all their names: the ``tensors`` of its file, tables, and ``more``."""
    parameters: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    stored = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    assert parameters.keys() == stored.keys() | {"embed_tokens.weight", "lm_head.weight", *more}
    assert all(torch.equal(parameters[name], tensor.double()) for name, tensor in stored.items())
    return parameters


def _tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters by their names, those that are shared once."""
    return dict(module.named_parameters())
