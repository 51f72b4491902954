"""A model of the transformers library (a folder or a GGUF file) as a Scorer, in fp32."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from models.bodies.branches import visible
from models.convert.transformers_checkpoint import Source
from models.convert.transformers_checkpoint import load_transformers as load_model
from models.errors import UserError
from models.files import sha256
from models.generation.settings import GenerationSettings
from models.harness.scoring import Batch, Ids, Row
from models.packages import PACKAGED, need, packaged_gguf

WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
# Every token sees all before it: no windows, under whatever name. Branches of a row were compared with rows of their own.
FULL_ATTENTION = {"codegen", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "llama", "opt", "xglm"}
SCORES_AT_ONCE = 1 << 24  # fp32 scores that exist beside the model's own: 64 MiB


class TransformersScorer:
    """A causal language model with its own tokenizer."""

    def __init__(self, name: str, model: Any, tokenizer: Any, device: torch.device, files: dict[str, str]) -> None:
        """``model``, ``tokenizer``: of transformers. ``files``: names and hashes of the weights."""
        self.name, self._files, self._device = name, files, device
        self._model, self._tokenizer = model.to(device).eval(), tokenizer
        self.context: int = _context(model.config, tokenizer)
        self.eos_id = tokenizer.eos_token_id
        self.bos_id = _added_bos(tokenizer)
        known = [i for i in (tokenizer.bos_token_id, self.eos_id) if i is not None]
        if not known:
            raise UserError(f"{name}: its tokenizer has neither a beginning- nor an end-of-text token")
        self.prefix_id = known[0]
        self.branches = self._takes_branches()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Ids) -> str:
        return self._tokenizer.decode(list(ids))

    @torch.inference_mode()
    def score(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        batch = Batch.of(rows).to(self._device)
        scores, targets = self._scores(batch, branches=bool(rows[0].prefix)), batch.targets
        logprob, greedy = torch.empty(len(targets)), torch.empty(len(targets), dtype=torch.bool)
        step = max(1, SCORES_AT_ONCE // scores.shape[-1])
        for part in (slice(start, start + step) for start in range(0, len(targets), step)):
            chunk = scores[part].float()
            logprob[part] = -F.cross_entropy(chunk, targets[part], reduction="none").cpu()
            greedy[part] = (chunk.argmax(-1) == targets[part]).cpu()
        return logprob, greedy

    def _scores(self, batch: Batch, branches: bool) -> Tensor:
        """Scores [N, V] at the positions asked for only: the output layer, whatever it is, gets their hidden states alone."""

        def select(layer: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
            return (inputs[0][batch.rows, batch.columns][None],)

        places = {}
        if branches:
            hidden = ~visible(batch.positions, batch.segments)
            dtype = self._model.dtype
            mask = torch.zeros(hidden.shape, dtype=dtype, device=self._device).masked_fill_(hidden, torch.finfo(dtype).min)
            places = {"attention_mask": mask, "position_ids": batch.positions}
        hook = self._model.get_output_embeddings().register_forward_pre_hook(select)
        try:
            return self._model(input_ids=batch.ids, use_cache=False, **places).logits[0]
        finally:
            hook.remove()

    def _takes_branches(self) -> bool:
        """Whether the model minds positions and masks that it is given, so that branches of a row score as rows of their own.

        Only of kinds without attention in windows: transformers would take our mask for the window's, and a probe as short as this
        one would not show it.
        """
        config = self._model.config.get_text_config()
        if config.model_type not in FULL_ATTENTION:
            return False
        ids = [i % config.vocab_size for i in (self.prefix_id, 5, 9, 7, 11, 3)]
        first, second = (ids[3], ids[4]), (ids[3], ids[5], ids[1])
        asked = [{branch: [(0, branch)]} for branch in (first, second)]
        try:
            together, _ = self.score([Row(tuple(ids[:3]), asked[0] | asked[1])])
        except Exception:  # of models that take no positions, or other masks
            return False
        apart, _ = self.score([Row((), {(*ids[:3], *branch): [(0, branch)]}) for branch in (first, second)])
        return torch.allclose(together, apart, atol=1e-3)

    @torch.inference_mode()
    def generate(self, prompts: Sequence[str], settings: GenerationSettings) -> list[str]:
        with torch.random.fork_rng():  # transformers draws from the global generator
            torch.manual_seed(settings.seed)
            return [self._continue(prompt, settings) for prompt in prompts]

    def _continue(self, prompt: str, settings: GenerationSettings) -> str:
        ids = [*([] if self.bos_id is None else [self.bos_id]), *self.encode(prompt)] or [self.prefix_id]
        drawing = {name: getattr(settings, name) for name in ("temperature", "top_p", "min_p")} | {"top_k": settings.top_k or 0}

        def written(row: Tensor) -> str:
            return self._tokenizer.decode(row[len(ids) :], skip_special_tokens=True)

        def stopped(rows: Tensor, scores: Any, **_: Any) -> Tensor:
            return torch.tensor([any(stop in written(row) for stop in settings.stop) for row in rows], device=rows.device)

        made = self._model.generate(
            torch.tensor([ids], device=self._device),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=self._device),
            max_new_tokens=settings.max_tokens,
            eos_token_id=self.eos_id,
            pad_token_id=self.prefix_id,
            do_sample=settings.temperature > 0,
            repetition_penalty=settings.repetition_penalty,
            stopping_criteria=[stopped],
            **(drawing if settings.temperature > 0 else {}),
        )
        text = written(made[0])
        return text[: min([place for stop in settings.stop if (place := text.find(stop)) >= 0], default=len(text))]

    def describe(self) -> dict[str, Any]:
        return {"files": self._files, "dtype": str(self._model.dtype).removeprefix("torch."), "context": self.context}


def load_transformers(spec: str, device: torch.device) -> TransformersScorer:
    """The model that ``spec`` names: a folder in transformers' format, a ``.gguf`` file, or the name of a packaged one (smollm2).

    Nothing is downloaded. Raises UserError when it is missing or cannot be read.
    """
    transformers = need("transformers", f"--hf {spec}")
    path = packaged_gguf(spec) if spec in PACKAGED else Path(spec)
    if not path.exists():
        raise UserError(f"{spec}: does not exist; give a folder in transformers' format, a .gguf file, or {', '.join(PACKAGED)}")
    options: dict[str, Any] = {"local_files_only": True}
    folder = path
    if path.is_file():
        if path.suffix != ".gguf":
            raise UserError(f"{path}: expected a .gguf file, or a folder in transformers' format")
        need("gguf", f"--hf {spec}")
        folder, options["gguf_file"] = path.parent, path.name
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
    except Exception as error:  # its checks of settings and files raise of many kinds
        raise UserError(f"{path}: transformers cannot load its tokenizer ({' '.join(str(error).split())})") from error
    model = load_model(Source(folder, options.get("gguf_file"), spec))
    files = [path] if path.is_file() else sorted(file for pattern in WEIGHTS for file in path.glob(pattern))
    return TransformersScorer(spec, model, tokenizer, device, {file.name: sha256(file) for file in files})


def _added_bos(tokenizer: Any) -> int | None:
    """The beginning-of-text id, if the tokenizer puts it before every text by itself."""
    bos = tokenizer.bos_token_id
    return bos if bos is not None and tokenizer.encode("a")[:1] == [bos] else None


def _context(config: Any, tokenizer: Any) -> int:
    """The longest input, as lm-eval's own adapter finds it: the model's settings, else the tokenizer's, else 2,048."""
    for name in ("n_positions", "max_position_embeddings", "n_ctx"):
        if getattr(config, name, None):
            return getattr(config, name)
    limit = getattr(tokenizer, "model_max_length", None)
    return limit if limit and limit < 10**20 else 2048
