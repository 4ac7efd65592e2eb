"""Multi-token prediction (MTP): one or several small modules that are trained together with a target.

Module ``m`` at row ``p`` reads the token at ``p + m + 1`` and predicts the one at ``p + m + 2``
(:mod:`specgraph.drafters.mtp_module`). With ``P`` the position of the newest verified token, row ``p`` of module ``m``
is final once ``p + m + 1 <= P``; its rows ``P - m .. P - 1`` are *provisional*, because they read drafts. So every step
runs again, always, what may have been provisional: with ``M`` modules, all of them run the ``M - 1`` rows before the
window's and the accepted rows of the window. A row that becomes final lies among these rows in the step in which that
happens, whether everything or nothing was accepted. So the keys and values of final rows, and with them all drafts, are
functions of the accepted tokens alone. What a sequence keeps for this is the target's hidden states of its last
``M - 1`` rows, the tokens behind them, and how many of these rows there are.

Draft ``j < M`` comes from module ``j`` at row ``P - 1``. Further drafts come from the last module, which goes on at the
rows ``P, P + 1, ...`` with its own output in the place of a hidden state, like an EAGLE head. These rows are written
again in the next step before anything else reads them. With ``draft.beyond=turns`` the modules draft in turns instead,
all at row ``P - 1``, which every step then runs again, too.

Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.2). Gloeckle et al. 2024 (arXiv 2404.19737) introduced the objective.
"""

from __future__ import annotations

import itertools
import operator
import re
from dataclasses import dataclass, field, replace
from typing import Any, Self

from torch import Tensor, fx
from transformers import PreTrainedModel

from specgraph.checkpoints.checkpoint import Checkpoint, Choice
from specgraph.checkpoints.files import Files, open_files
from specgraph.checkpoints.loading import shared_notes
from specgraph.checkpoints.modules import declared_modules
from specgraph.config.drafters import MtpDraftConfig
from specgraph.drafters import mtp_layouts as layouts
from specgraph.drafters import mtp_loading as loading
from specgraph.drafters.base import Draft, DraftHead, Target
from specgraph.drafters.heads import HeadDrafter, Record
from specgraph.drafters.mtp_graphs import export, join, module_info, module_name, part_names
from specgraph.drafters.mtp_layers import check_layers, make_block
from specgraph.drafters.mtp_module import Mtp, MtpModule, MtpOptions
from specgraph.drafters.plan import HeadPlan
from specgraph.drafters.step import DraftStep
from specgraph.errors import ConfigError
from specgraph.ir.model_info import ModelInfo
from specgraph.kernels import step as functions
from specgraph.kernels.state import Buffer


@dataclass(frozen=True, eq=False)
class MtpDrafter(HeadDrafter):
    """Runs MTP modules.

    Attributes:
        options: how the modules are used.
        beyond: what makes the drafts beyond the number of modules, see :class:`MtpDraftConfig`.
    """

    options: MtpOptions = field(default_factory=MtpOptions)
    beyond: str = "continue"

    Config = MtpDraftConfig
    reads = "MTP modules"
    needs = None
    head = Mtp

    @property
    def name(self) -> str:
        """``mtp``, with the number of modules."""
        count = len(self.models)
        return f"{self.kind} ({count} module{'s' if count > 1 else ''})"

    @property
    def shifted(self) -> bool:
        """Row ``t`` of the first module takes token ``t + 1`` and a hidden state."""
        return True

    def build(self, step: DraftStep) -> int:
        """Append one call for every draft, and what keeps the rows that the next step runs again."""
        count, modules = self.num_speculative_tokens, len(self.models)
        bound = [self._add_module(step, index) for index in range(modules)]
        inputs, keep = self._rows(step)
        fed: fx.Node | None = None
        for index in range(count):
            module = self._module_of(index)
            given = bound[module] | inputs
            call = step.program.call(module_name(module), **given, name=f"draft_{index}", role="draft")
            if index >= modules:
                step.mark_scratch(call)
            logits = call
            if self._feeds(module):
                logits = step.call(operator.getitem, call, 0, name=f"draft_logits_{index}")
                fed = step.call(operator.getitem, call, 1, name=f"draft_hidden_{index}") if index < count - 1 else None
            token = step.draw(logits, index, self.model.vocab_size, self.model.dtype)
            if index < count - 1:
                inputs |= self._next(step, inputs, index + 1, token, fed)
        if keep:
            step.call(functions.keep_rows_, *keep, step.num_emitted, name="keep_rows_")
        return count

    @property
    def num_kept(self) -> int:
        """``R``, the number of rows before the window's that every step runs again."""
        turns = self.beyond == "turns" and self.num_speculative_tokens > len(self.models)
        return max(len(self.models) - 1, int(turns))

    def _module_of(self, index: int) -> int:
        """The module that makes draft ``index``."""
        modules = len(self.models)
        return index % modules if self.beyond == "turns" else min(index, modules - 1)

    def _feeds(self, module: int) -> str | None:
        """The second result of a module's call, beside the logits: its output at all rows (``rows``), at the last one
        (``row``), or nothing.
        """
        chained = self.options.family == "chained"
        if module < len(self.models) - 1:
            return "rows" if chained else None
        read = chained or self.beyond == "continue"
        return "row" if read and self.num_speculative_tokens > len(self.models) else None

    def _add_module(self, step: DraftStep, index: int) -> dict[str, fx.Node]:
        """Make module ``index`` callable; returns the state that it asks for."""
        name = module_name(index)
        modules = step.program.modules
        body, norm, head = map(modules.pop, part_names(name))
        modules[name] = join(body, norm, head, self._feeds(index), self.options, name)
        return step.program.bind(name, name)

    def _rows(self, step: DraftStep) -> tuple[dict[str, fx.Node], list[fx.Node]]:
        """Inputs of the first module, and arguments of :func:`keep_rows_`: the state, and the values that it keeps."""
        (hidden,) = step.features()
        tokens = step.next_tokens(self.model.input_ids)
        if not self.num_kept:
            return {"tokens": tokens, "positions": step.positions, "hidden": hidden, "num_rows": step.num_emitted,
                    "row": step.last}, []  # fmt: skip
        kept = self._kept(step)
        again = step.call(functions.rerun, *kept, tokens, hidden, step.start, step.num_emitted, name="again")
        names = ("tokens", "hidden", "positions", "num_rows", "row")
        rows = {name: step.call(operator.getitem, again, i, name=f"module_{name}") for i, name in enumerate(names)}
        return rows, [*kept, rows["tokens"], rows["hidden"]]

    @property
    def lookahead(self) -> int:
        """The last of M modules reads at row ``p`` the token at ``p + M``."""
        return self.num_kept + 1

    def _kept(self, step: DraftStep) -> list[fx.Node]:
        """The state: what the first module takes at the last rows, and how many of these there are."""
        count, model = self.num_kept, self.model
        buffers = {
            "kept_tokens": Buffer(("B", count)),
            "kept_hidden": Buffer(("B", count, model.hidden_size), model.dtype),
            "num_kept": Buffer(("B",)),
        }
        return [step.state(name, buffer) for name, buffer in buffers.items()]

    def _next(
        self, step: DraftStep, inputs: dict[str, fx.Node], index: int, token: fx.Node, fed: fx.Node | None
    ) -> dict[str, fx.Node]:
        """Inputs of the call that makes draft ``index``, where they differ from those of the call before."""
        modules = len(self.models)
        if index < modules:
            tokens = step.call(
                functions.next_module_tokens, inputs["tokens"], inputs["num_rows"], token, name=f"tokens_{index}"
            )
            return {"tokens": tokens} if fed is None else {"tokens": tokens, "hidden": fed}
        turns = self.beyond == "turns"
        # Taking turns, modules stay at the row P - 1. Else the last module goes on at the rows P, P + 1, ...
        offset = -1 if turns else index - modules
        position = step.position(offset, f"position_{index}")
        if fed is None:
            fed = step.call(functions.take_rows, inputs["hidden"], inputs["row"], 1, name=f"last_hidden_{index}")
        return {"tokens": token, "positions": position, "hidden": fed, "num_rows": step.num_emitted}

    # The registry entry

    @classmethod
    def recognise(cls, files: Files) -> Checkpoint | None:
        """Recognise files that hold MTP modules and no target."""
        whole = any(re.match(r"model\.(layers\.0|embed_tokens)\.", name) for name in files.tensors)
        return None if whole else cls.recognise_inside(files)

    @classmethod
    def recognise_inside(cls, files: Files) -> Checkpoint | None:
        """Recognise MTP modules, also among the tensors of a target."""
        layout = layouts.recognise(files.config, files.tensors)
        return None if layout is None else Checkpoint.of(files, cls.kind, layout.name, "mtp")

    @classmethod
    def choices(cls, checkpoint: Checkpoint, options: MtpDraftConfig, target_layers: int | None) -> tuple[Choice, ...]:
        """The number of modules, and how they are used."""
        count = len(loading.used_modules(checkpoint, options.num_modules))
        from_ = "tensors" if options.num_modules is None else "draft.num_modules"
        used = loading.used_options(checkpoint, options, layouts.text_config(checkpoint.config), range(count))
        names, sources = vars(used[0][0]), used[0][1]
        choices = (Choice(n, layouts.shown_values([vars(own)[n] for own, _ in used]), sources[n]) for n in names)
        return (Choice("num_modules", count, from_), *choices)

    @classmethod
    def check_fit(cls, checkpoint: Checkpoint, options: Any, model: PreTrainedModel, info: ModelInfo) -> None:
        """Compare names and shapes; nothing is read."""
        loading.check_modules(checkpoint, options, model, info)

    @classmethod
    def load(cls, checkpoint: Checkpoint, options: Any, model: PreTrainedModel, info: ModelInfo) -> DraftHead:
        """Read the modules that are used."""
        checked = loading.check_modules(checkpoint, options, model, info)
        loaded = (loading.load_module(loader, used, index) for index, (loader, used) in enumerate(checked))
        return DraftHead(Mtp(loaded), (cls.hidden_layer(checked[0][1], info.num_layers),))

    @staticmethod
    def hidden_layer(options: MtpOptions, num_layers: int) -> int:
        """The index ``k`` of the target's hidden state ``hs[k]`` that modules read."""
        return num_layers if options.target_hidden == "final_norm" else num_layers + 1

    @classmethod
    def make(cls, options: MtpDraftConfig, target: Target, given: Any) -> Draft:
        """Bind modules as other heads are; None takes the target's own.

        Raises:
            ConfigError: there is no checkpoint of the target, it holds no modules, or they do not fit.
        """
        return super().make(options, target, own_modules(target.model) if given is None else given)

    @classmethod
    def inputs_of(cls, module: Mtp) -> tuple[Tensor, int, int]:
        """Modules read one hidden state, as wide as their own."""
        first: Any = module[0]
        return first.projection.weight, len(first.projection.weight), 1

    @classmethod
    def shared(cls, checkpoint: Checkpoint, options: Any, module: Any, model: PreTrainedModel) -> tuple[str, ...]:
        """A line for every tensor of a module that is the target's own."""
        stored = loading.used_modules(checkpoint, options.num_modules)
        found = (shared_notes(stored[i], own, model, module_name(i)) for i, own in enumerate(module))
        return tuple(itertools.chain.from_iterable(found))

    @classmethod
    def bind(cls, head: DraftHead, options: MtpDraftConfig, target: Target) -> Self:
        """The drafter that runs loaded modules, or the first of them if there are more than drafts."""
        count = options.num_speculative_tokens
        modules: Any = head.module[: max(1, count)]
        graphs: dict[str, fx.GraphModule] = {}
        for index, module in enumerate(modules):
            graphs |= export(module, target.model, target.traced, module_name(index))
        infos = {module_name(index): module_info(target.info) for index in range(len(modules))}
        return cls(count, graphs, infos, head.features, options=modules[0].options, beyond=options.beyond)

    @classmethod
    def new_head(cls, algorithm: str, plan: HeadPlan) -> DraftHead:
        """Untrained modules, as many as the plan has layers."""
        cls.check_plan(plan, "MTP modules read", "MTP modules draft")
        check_layers(plan)
        text: Any = plan.model.config.get_text_config()
        modules = []
        for index in range(plan.layers.num_hidden_layers):
            used = replace(MtpOptions(), family=plan.family, **layouts.declared_kinds(text, index))  # type: ignore[arg-type]
            block: Any = make_block(plan.model, plan.model.device, used)
            rotary = getattr(block, "rotary_emb", None)  # the target's own, whose frequencies keep their dtype
            block.rotary_emb = None
            block.float().rotary_emb = rotary
            module = MtpModule(plan.model, block, used, index)
            module.start_from_hidden()
            modules.append(module)
        return DraftHead(Mtp(modules), plan.features)

    @staticmethod
    def saved_config(head: DraftHead, record: Record) -> dict[str, Any]:
        """The configuration of the speculators layout.

        The layout holds one module. Further ones are numbered on, and ``mtp_options`` says how they are used.
        """
        return {
            "architectures": ["MTPDraftModel"],
            "speculators_model_type": "mtp",
            "num_nextn_predict_layers": len(head.module),
            layouts.OPTIONS: vars(head.module.options),
            "transformer_layer_config": head.module[0].block.config.to_diff_dict(),
            "base_model_name_or_path": record.target_name,
        }

    @classmethod
    def saved_tensors(cls, head: DraftHead) -> dict[str, Tensor]:
        """The tensors of the speculators layout."""
        return loading.published(head.module, layouts.LAYOUTS["speculators"])

    @classmethod
    def random(cls, model: PreTrainedModel, options: MtpDraftConfig) -> DraftHead:
        """``draft.num_modules`` random modules (1 by default) whose embedding and projection are the target's."""
        text: Any = model.config.get_text_config()
        given = {name: value for name, value in loading.own_options(options).items() if value is not None}
        kinds = (layouts.declared_kinds(text, index) for index in range(options.num_modules or 1))
        used = [replace(MtpOptions(), **own | given) for own in kinds]
        blocks = (make_block(model, model.device, own).requires_grad_(False) for own in used)
        modules = Mtp(MtpModule(model, block, used[index], index) for index, block in enumerate(blocks))
        return DraftHead(modules.eval(), (cls.hidden_layer(used[0], text.num_hidden_layers),))


def own_modules(model: PreTrainedModel) -> Checkpoint:
    """The modules in the checkpoint that a model was loaded from.

    Raises:
        ConfigError: it has no checkpoint on this machine, or that holds none.
    """
    files = open_files(loading.own_folder(model))
    found = MtpDrafter.recognise_inside(files)
    if found is None:
        declared = declared_modules(files.config)
        why = f", although its config.json names {declared}" if declared else ""
        raise ConfigError(
            f"{files.path} holds no MTP modules{why}; give a checkpoint that does by draft=... or draft.model, or use "
            "another drafter."
        )
    return found
