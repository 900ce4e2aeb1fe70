"""Options of the data sources data=tokens and data=mix. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le

from gangline import Part, Problem, UserError
from gangline.config import DataConfig, NonNegativeFloat, PositiveFloat, PositiveInt, Share

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_basics.data.chat import ChatTemplate
    from gangline_basics.data.codec import TextCodec
    from gangline_dataloader.store.remote.cache import RemoteCache


Epochs = Annotated[int, Ge(1), Le(1_000_000)]
FRACTION = 0.01  # default of data.validation_fraction, for stores without a validation part
CACHE = ("cache", "cache_bytes", "deadline")


@dataclass
class SequenceConfig(DataConfig, ABC):
    """Options shared by all data sources that read token stores: packing, FIM, validation split and shard cache."""

    layout_options: ClassVar[tuple[str, ...]] = CACHE

    # document masking: no attention and no loss across document boundaries, position ids restart at each document
    document_masking: bool = False
    # sequence packing; concatenate: documents are concatenated, then split into sequences of equal length; best_fit:
    # documents are packed by the store's pack plan, which splits only documents longer than a sequence; to write the
    # plan for T=batch.sequence_length: gangline data prepare --out DIR --pack T
    packing: Literal["concatenate", "best_fit"] = "concatenate"
    fim_rate: Share = 0.0  # fraction of training documents rearranged for fill-in-the-middle (FIM); 0: no FIM
    # fraction of FIM documents in suffix-prefix-middle order (SPM); all other FIM documents are in
    # prefix-suffix-middle order (PSM)
    fim_spm_rate: Share = 0.5
    fim_tokens: list[str] = field(  # FIM sentinel tokens, names in the store's tokenizer: [prefix, middle, suffix]
        default_factory=lambda: ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]
    )
    # fraction of the sequences held out for validation, taken from the end of each shard; ignored if gangline data
    # prepare held out documents; 1: validation on the complete store (only for stores of validate.sets)
    validation_fraction: Share = FRACTION
    cache: str = "~/.cache/gangline/data"  # directory of the shard cache for remote stores (their path is a URL)
    cache_bytes: PositiveInt = 100_000_000_000  # maximum size of the shard cache per machine, in bytes
    deadline: PositiveFloat = 600.0  # timeout in seconds to fetch one file of a store behind a URL, retries included

    def make_remote_cache(self) -> RemoteCache:
        """Return the directory, size limit and timeout of the shard cache for stores behind URLs."""
        from gangline_dataloader.store.remote.cache import RemoteCache

        return RemoteCache(self.cache, self.cache_bytes, self.deadline)

    @abstractmethod
    def list_paths(self) -> list[str]:
        """List the paths and URLs of the stores that the options name."""

    def build_codec(self, run: Run) -> TextCodec | None:
        from gangline_dataloader.sources.codec import open_codec, open_stores

        return next((open_codec(store) for store in open_stores(self)), None)

    def build_chat_template(self, run: Run) -> ChatTemplate | None:
        from gangline_dataloader.sources.codec import find_chat_template, open_stores

        return find_chat_template(open_stores(self))

    def export_files(self, run: Run) -> dict[str, bytes]:
        from gangline_basics.data.codec import TokenizerCodec
        from gangline_basics.data.tokenizer_files import read_tokenizer_files

        codec = self.build_codec(run)
        return (
            read_tokenizer_files(codec.path, run.model.get_weights_directory())
            if isinstance(codec, TokenizerCodec)
            else {}
        )

    def list_notices(self, run: Run) -> list[str]:
        from gangline_dataloader.sources.codec import (
            open_stores,
            report_glued_texts,
            report_old_masks,
            report_unused_fraction,
        )

        stores = open_stores(self)
        unused = report_unused_fraction(stores, self.validation_fraction, FRACTION)
        return [*report_old_masks(stores), *report_glued_texts(stores), *unused]

    def check_fraction(self, run: Run) -> list[Problem]:
        """Return a problem if data.validation_fraction=1 is set for the store that the run trains on."""
        if self.validation_fraction < 1 or self is not run.data:
            return []
        return [
            Problem(
                "data.validation_fraction=1 leaves no sequences to train on.",
                "Only a store of validate.sets may be held out completely.",
                "Choose 0 <= data.validation_fraction < 1.",
            )
        ]


@dataclass
class TokensConfig(SequenceConfig):
    """Options of data=tokens: one token store, as `gangline data prepare` writes it, or files in an external format."""

    file_options: ClassVar[tuple[str, ...]] = ("path", "cache")

    path: str | None = None  # required: token store (directory or URL), or path or pattern of .bin, MDS, Arrow, Parquet
    # token column of MDS, Arrow or Parquet files (NAME, or NAME:DTYPE for an MDS column of bytes), or token dtype of a
    # raw .bin file (:uint16, :uint32, :int32 or :int64); null: the column input_ids, tokens or the only column, and for
    # a .bin file the dtype that its header or index records, else uint16
    column: str | None = None
    # shuffle window in tokens: windows are shuffled, then sequences in each window; null: one window, the full store
    shuffle_span: PositiveInt | None = None
    # sample order; shuffled: shuffled within windows of data.shuffle_span; text: same order as data=text, for comparing
    # the two
    order: Literal["shuffled", "text"] = "shuffled"

    def list_paths(self) -> list[str]:
        return [self.path] if isinstance(self.path, str) else []

    def check(self, run: Run) -> list[Problem]:
        from gangline_dataloader.store.external import is_external
        from gangline_dataloader.store.manifest import read
        from gangline_dataloader.store.remote.tokens import is_remote

        if not isinstance(self.path, str):
            return [
                Problem(
                    "data=tokens needs data.path.",
                    "data.path is the directory of a token store.",
                    "Create a store: gangline data prepare INPUT --out DIR, then set data.path=DIR",
                )
            ]
        if problems := self.check_fraction(run):
            return problems
        if is_external(self.path):
            return self._check_external(run)
        if is_remote(self.path):
            return self._check_remote(run)
        try:
            manifest = read(self.path)
        except UserError as error:
            return [error.to_problem()]
        problems = self._check_sequences(run)
        problems += self._check_vocabulary(run, manifest.vocab_size)
        if manifest.tokens <= run.batch.sequence_length:
            problems.append(
                Problem(
                    f"data.path={self.path} is too short.",
                    f"The store has {manifest.tokens} tokens; one sequence needs {run.batch.sequence_length + 1}.",
                    "Prepare a store of more text, or reduce batch.sequence_length.",
                )
            )
        return problems or self._check_files(run)

    def list_notices(self, run: Run) -> list[str]:
        """Return the notices of the base class, and one for a local store with a much smaller vocabulary."""
        from gangline_dataloader.store.external import is_external
        from gangline_dataloader.store.manifest import read
        from gangline_dataloader.store.remote.tokens import is_remote

        notices = super().list_notices(run)
        if not isinstance(self.path, str) or is_external(self.path) or is_remote(self.path):
            return notices
        model_size, store_size = run.model.vocab_size, read(self.path).vocab_size
        if 2 * store_size < model_size:
            notices.append(
                f"the vocabulary of data.path={self.path} is {store_size}, model.vocab_size is {model_size}: the store "
                "may be made with another tokenizer (gangline data prepare --tokenizer FILE)"
            )
        return notices

    def _check_files(self, run: Run) -> list[Problem]:
        """Return a problem for each store with files that are missing or differ in size from the manifest."""
        from gangline_dataloader.sources.build import open_run_parts
        from gangline_dataloader.sources.present import find_file_problems

        try:
            return find_file_problems(open_run_parts(self, run))
        except UserError as error:
            return [error.to_problem()]

    def _check_vocabulary(self, run: Run, needed: int) -> list[Problem]:
        from gangline.data.vocabulary import find_vocabulary_problems

        return find_vocabulary_problems(
            run.model.vocab_size, needed, f"data.path={self.path}", f"The tokenizer of the store has {needed} tokens."
        )

    def _check_remote(self, run: Run) -> list[Problem]:
        """Return the problems of a store behind a URL. Reads manifests, but no shards."""
        from gangline_dataloader.sources.build import open_run_parts
        from gangline_dataloader.sources.present import find_file_problems
        from gangline_dataloader.sources.room import check_room

        try:
            parts = open_run_parts(self, run)
            span = None if self.order == "text" else self.shuffle_span  # data.order=text has no shuffle windows
            check_room(parts, span, self.cache_bytes, run.batch.sequence_length)
        except UserError as error:
            return [error.to_problem()]
        return self._check_vocabulary(run, parts[0].store.vocab_size) or find_file_problems(parts)

    def _check_sequences(self, run: Run) -> list[Problem]:
        from gangline_dataloader.sources.build import open_run_parts

        if self.packing == "concatenate" and not self.fim_rate:
            return []
        if self.packing == "best_fit" and self.order == "text":
            what = "data.order=text requires data.packing=concatenate."
            why = "data.order=text is the order of data=text, which splits its text into consecutive sequences."
            return [Problem(what, why, "Set data.order=shuffled or data.packing=concatenate.")]
        try:
            open_run_parts(self, run)
        except UserError as error:
            return [error.to_problem()]
        return []

    def _check_external(self, run: Run) -> list[Problem]:
        from gangline_dataloader.sources.build import build_tokens

        try:
            source = build_tokens(self, run, "train" if self is run.data else "validation")
        except UserError as error:
            return [error.to_problem()]
        if self.document_masking and source.stores[0].documents is None:
            what = f"data.document_masking=true needs the ends of documents, which {self.path} does not store."
            return [Problem(what, "Files of nanoGPT and llm.c hold only tokens.", "data.document_masking=false")]
        return []


@dataclass
class MixConfig(SequenceConfig):
    """Options of data=mix: a weighted mixture of token stores that share a tokenizer.

    Weights are normalised to shares of the samples. The proportions of the sources are exact in the long run, each
    source is read epoch by epoch, and the order of samples is a function of (seed, sources, weights, sample number).
    """

    file_options: ClassVar[tuple[str, ...]] = ("path", "sources", "cache")
    # A resumed run may find a store at another path, and may change the mixture from its next sample on, because a
    # checkpoint records the mixture of all samples before it.
    layout_options: ClassVar[tuple[str, ...]] = ("sources", "weights", "epochs", "stages", *CACHE)

    sources: dict[str, str] = field(default_factory=dict)  # token stores by source name: {web: DIR, code: URL}
    weights: dict[str, NonNegativeFloat] = field(  # mixture weights by source name: relative shares of the samples;
        default_factory=dict  # {}: weights proportional to the number of sequences of each source
    )
    epochs: dict[str, Epochs] = field(  # maximum number of epochs by source name: {code: 4};
        default_factory=dict  # a source without an entry repeats without limit
    )
    stages: list[dict[str, Any]] = field(  # changes of the mixture weights during the run:
        default_factory=list  # [{from: SAMPLE_NUMBER, weights: {...}}, ...]; []: data.weights from start to end
    )
    # shuffle window in tokens: windows are shuffled, then sequences in each window; null: one window, the full source
    shuffle_span: PositiveInt | None = None

    def list_paths(self) -> list[str]:
        return [path for _, path in sorted(self.sources.items())]

    def check(self, run: Run) -> list[Problem]:
        from gangline_dataloader.sources.mixture import find_problems

        return find_problems(self, run)


PARTS = (
    Part(
        name="tokens",
        config=TokensConfig,
        build="gangline_dataloader.sources.build:build_tokens",
        capabilities={"sample": "gangline_basics.sampling.show:show_sample"},
        summary="token store of `gangline data prepare`, memory-mapped from disk or read from a URL",
    ),
    Part(
        name="mix",
        config=MixConfig,
        build="gangline_dataloader.sources.build:build_mix",
        capabilities={"sample": "gangline_basics.sampling.show:show_sample"},
        summary="weighted mixture of token stores, with epoch limits and stages",
    ),
)
