"""Examples and losses of the recipes other than RL: [data], [records], [preference], [reward_model], [verifier] and [selfplay]."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field

from nmoe.config.base import Array, Conflict, DataPath, Section, duplicates, split_path
from nmoe.config.tables.rollout import fault_of_urls
from nmoe.config.tables.run import NAME


class MixtureSource(Section):
    """One source of a mixture."""

    path: str = Field(min_length=1)
    """dataset of this source, as `documents` of [data]"""
    weight: float = Field(default=1.0, gt=0)
    """share of the tokens, relative to the other sources' weights"""
    name: str = ""
    """name of the source in metrics, unique; default: the file's name"""

    def conflicts(self) -> Iterator[Conflict]:
        if not re.fullmatch(NAME, self.label):
            yield Conflict(
                "name" if self.name else "path",
                f"the source's name would be {self.label!r}; give it a `name`, which metrics carry: letters, digits and "
                ". _ + = -, the first a letter or digit",
            )

    @property
    def label(self) -> str:
        """The source's name; by default the file name at the end of its path, without extension."""
        return self.name or Path(split_path(self.path)[0]).name.partition(".")[0]


class DocumentSourceSection(MixtureSource):
    """[[data.sources]]: one source of a mixture of documents."""


class DataSection(Section):
    """[data]: the text to pretrain on."""

    documents: str | None = Field(default=None, min_length=1)
    """dataset with a document's `text` or `token_ids` in each row: a file, a directory or a hub name"""
    sources: Array[DocumentSourceSection] = ()
    """several datasets, mixed by weight, as [[data.sources]], in place of `documents`"""
    tokens_per_step: int = Field(default=16384, gt=0)
    """tokens per optimizer step"""
    held_out_documents: int = Field(default=0, ge=0)
    """documents of each source held out for evaluation"""
    shuffle_mb: int = Field(default=64, gt=0)
    """MiB of text of each source that are in memory and shuffled together; a smaller source is shuffled as a whole"""
    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """processes that read and tokenise documents; 0: the run's own alone; auto: one for each two cores, at most 8, and none if all
    sources are smaller than `shuffle_mb`"""

    def conflicts(self) -> Iterator[Conflict]:
        if self.documents is None and not self.sources:
            yield Conflict("", "needs either documents (one dataset) or [[data.sources]] (a mixture)")
        if self.documents is not None and self.sources:
            yield Conflict("documents", "there are [[data.sources]] too: make it one of them")
        yield from duplicates("sources", (source.label for source in self.sources))

    @property
    def mixture(self) -> tuple[DocumentSourceSection, ...]:
        """The sources to pretrain on; `documents` counts as a single source."""
        return (
            self.sources if self.documents is None else (DocumentSourceSection(path=self.documents, name="documents"),)
        )


Kind = Literal["text", "messages", "prompt", "prompt_completion", "preference", "stepwise"]
"""The formats that a record of training data may have (docs/guides/data.md)."""

Column = Literal["text", "messages", "tools", "prompt", "completion", "chosen", "rejected", "completions", "labels"]
"""The column names that these formats consist of."""


class DatasetSettings(Section):
    """Records of a dataset: a file, a directory, or a name on the hub."""

    path: Annotated[str, DataPath(may_be_name=True)] = Field(min_length=1)
    """file (JSONL, JSON, Parquet, CSV), directory or Hugging Face name; `@[a:b]` selects some of its rows"""
    data_files: Array[str] = ()
    """files of `path` to read, wildcards allowed; with `json`, `parquet`, `csv`: local ones"""
    subset: str | None = None
    """the dataset's configuration, such as `main`"""
    split: str = Field(default="train", min_length=1)
    """split, with an optional slice such as `train[:1024]`"""
    kind: Kind | None = None
    """the format of the records; default: recognised by their columns"""
    columns: dict[str, str] = Field(default={})
    """the data's columns for the format's columns: `{prompt = "question", completion = "answer"}`"""

    def conflicts(self) -> Iterator[Conflict]:
        known = get_args(Column)
        for column in self.columns:
            if column not in known:
                yield Conflict("columns", f"{column!r} is not a column of a format; the columns are {', '.join(known)}")


class RecordsSection(DatasetSettings):
    """[records] of DPO and reward models: the preference pairs to learn from."""

    format: Literal["auto", "harmony", "chat", "text"] = "auto"
    """how records become tokens: Harmony, the tokenizer's chat template, or plain text; auto: Harmony if the tokenizer has its
    control tokens, else its chat template"""
    tokens_per_step: int = Field(default=16384, gt=0)
    """tokens per optimizer step"""
    epochs: float | None = Field(default=None, gt=0)
    """passes over the records, in place of run.steps; may be a fraction"""
    held_out: float = Field(default=0.0, ge=0)
    """records held out for evaluation: a share if below 1, else their number; records with the same prompt stay together"""
    held_out_path: Annotated[str | None, DataPath(may_be_name=True)] = Field(default=None, min_length=1)
    """separate records to evaluate on, read like the records of `path`"""
    held_out_split: str | None = Field(default=None, min_length=1)
    """split to evaluate on, of `held_out_path` if given, else of `path`"""

    def conflicts(self) -> Iterator[Conflict]:
        if self.held_out > 1 and not self.held_out.is_integer():
            yield Conflict("held_out", "is neither a share, below 1, nor a number of records, which is whole")
        for key in ("held_out_path", "held_out_split"):
            if self.held_out > 0 and getattr(self, key) is not None:
                yield Conflict(key, "excludes held_out; evaluate on one of the two")

    @property
    def datasets(self) -> "tuple[DatasetSettings, ...]":
        """The datasets to train on."""
        return (self,)

    @property
    def holds_out(self) -> bool:
        return self.held_out > 0 or self.held_out_dataset is not None

    @property
    def held_out_dataset(self) -> DatasetSettings | None:
        """The records to evaluate on, if they come from another path or split; otherwise None."""
        if self.held_out_path is None and self.held_out_split is None:
            return None
        source: dict[str, object] = {} if self.held_out_path is None else {"path": self.held_out_path, "data_files": ()}
        return self.model_copy(update=source | {"split": self.held_out_split or "train"})


class RecordSourceSection(DatasetSettings, MixtureSource):
    """[[records.sources]]: one source of a mixture of records."""


class SFTRecordsSection(RecordsSection):
    """[records]: the examples that SFT, DPO and reward models learn from."""

    path: Annotated[str, DataPath(may_be_name=True)] = ""
    sources: Array[RecordSourceSection] = ()
    """several datasets, mixed by weight, as [[records.sources]], in place of `path`"""
    share_prefixes: bool = False
    """compute a prefix shared by several sequences of a step, such as a long instruction, only once; the router's load then
    counts it once"""

    def conflicts(self) -> Iterator[Conflict]:
        if not self.path and not self.sources:
            yield Conflict("path", "missing: give it (one dataset) or [[records.sources]] (a mixture)")
        yield from duplicates("sources", (source.label for source in self.sources))
        if not self.sources:
            return
        if self.path:
            yield Conflict("path", "there are [[records.sources]] too: make it one of them")
        if self.epochs is not None:
            yield Conflict("epochs", "the sources of a mixture end at different times; give run.steps")
        if self.held_out_path is None:
            if self.held_out_split is not None:
                yield Conflict("held_out_split", "of which source? name the data in held_out_path")
            # A run's record spells the defaults out.
            known = {key: field.default for key, field in DatasetSettings.model_fields.items() if key != "path"}
            for key in sorted(key for key, default in known.items() if getattr(self, key) != default):
                yield Conflict(key, "is of one dataset; give it to each of [[records.sources]]")

    @property
    def datasets(self) -> tuple[DatasetSettings, ...]:
        return self.sources or (self,)


class PreferenceSection(Section):
    """[preference]: the loss of DPO and its variants."""

    loss: Literal["sigmoid", "sigmoid_norm", "robust", "hinge", "ipo"] = "sigmoid"
    """sigmoid: DPO; sigmoid_norm: DPO with mean log-ratios over tokens; robust: unbiased under label noise; hinge: hinge loss;
    ipo: the squared loss of IPO, with mean log-ratios over tokens"""
    beta: float = Field(default=0.1, gt=0)
    """strength of the regularisation towards the reference model (tau of IPO)"""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """share of pairs that are assumed to be mislabelled"""
    sft_weight: float = Field(default=0.0, ge=0)
    """weight of an SFT loss on the preferred answer"""

    def conflicts(self) -> Iterator[Conflict]:
        if self.label_smoothing > 0 and self.loss in ("hinge", "ipo"):
            yield Conflict("label_smoothing", f'loss = "{self.loss}" has none; sigmoid, sigmoid_norm and robust do')


class RewardModelSection(Section):
    """[reward_model]: the Bradley-Terry loss of a reward model."""

    margin: float = Field(default=0.0, ge=0)
    """margin by which the preferred answer's reward should exceed the other's"""
    centering: float = Field(default=0.0, ge=0)
    """weight of the squared sum of a pair's rewards, which keeps their mean near 0"""


class VerifierSection(Section):
    """[verifier]: the labelled steps that a verifier is trained on, and how it judges: by generated labels, or by a head."""

    prm_source: str = Field(default="prm800k", min_length=1)
    """`prm800k`, `math_shepherd`, `both`, or a file, directory or hub name with records in their formats or the stepwise one;
    also `--prm_source=`"""
    prm_split: str = Field(default="train", min_length=1)
    """split, with an optional slice such as `train[:1024]`; also `--prm_split=`"""
    mode: Literal["step", "score"] = "step"
    """step: predict a label for every step; score: predict 0, 0.5 or 1 for whole solutions; also `--mode=`"""
    head: Literal["generative", "discriminative"] = "generative"
    """generative: the model answers with the label; discriminative: a head on the last token of each step"""
    reads: Literal["last", "every"] = "last"
    """the tokens of a step that a discriminative head reads: the last, or every token; with every, a step is right if each of
    its tokens is, which locates errors within a step without labels for tokens"""
    neutral: Literal["positive", "negative", "own"] = "positive"
    """the label of a neutral step; own: a third label, for a generative verifier"""
    language_weight: float = Field(default=0.0, ge=0)
    """weight of a language-modelling loss on right steps; 0: off"""
    prm800k: Annotated[str, DataPath(may_be_name=True)] = "tasksource/PRM800K"
    """PRM800K: a directory with phase1_train.jsonl and the like, a copy of its repository, or a Hugging Face name; the default
    also finds copies named openai/prm800k and prm800k"""
    math_shepherd: Annotated[str, DataPath(may_be_name=True)] = "peiyi9979/Math-Shepherd"
    """Math-Shepherd: a file, directory or Hugging Face name"""
    held_out_source: str | None = Field(default=None, min_length=1)
    """source to evaluate on, as `prm_source`; default: a held-out share of the problems"""
    held_out_split: str = Field(default="test", min_length=1)
    """the split of `held_out_source`"""
    held_out_share: float = Field(default=0.1, gt=0, lt=1)
    """share of the problems held out for evaluation if there is no `held_out_source`"""
    tokens_per_step: int = Field(default=16384, gt=0)
    """tokens per optimizer step"""

    @property
    def trains_head_alone(self) -> bool:
        """Whether only the head is trained, and the language model below it is frozen."""
        return self.head == "discriminative" and self.language_weight == 0

    def conflicts(self) -> Iterator[Conflict]:
        if self.reads == "every" and self.head == "generative":
            yield Conflict("reads", 'every is what a head reads; it needs head = "discriminative"')
        if self.neutral == "own" and (self.head, self.mode) != ("generative", "step"):
            yield Conflict(
                "neutral", 'own is a third label of steps; it needs head = "generative" and mode = "step" alone'
            )


class SelfplaySection(Section):
    """[selfplay]: how often each proof is verified, and which models are trained on the verifications."""

    problem_source: str | None = Field(default=None, min_length=1)
    """prm800k[:PATH], math_shepherd[:PATH], hf:NAME[:SUBSET]:SPLIT, deepseek_math_v2_inputs:PATH or jsonl:PATH; default: the
    source in [environment]"""
    problem_field: str | None = Field(default=None, min_length=1)
    """the field with the problem's text; default: the first of problem, question, prompt and input that exists"""
    max_problems: int = Field(default=1000, gt=0)
    """maximum problems per round"""
    verifications: int = Field(default=8, gt=0)
    """verifications of each proof (n)"""
    more_verifications: int = Field(default=8, ge=0)
    """verifications added to a proof that is in doubt after the first n: it is not accepted, or with a score that less than half of
    them give and confirm"""
    meta_verifications: int = Field(default=3, gt=0)
    """checks of each verification that claims a defect (m)"""
    confirmations: int = Field(default=2, gt=0)
    """number of confirmed verifications, of n, needed to accept the lowest score (k); it grows in proportion if more are added"""
    verifier: str | None = Field(default=None, min_length=1)
    """checkpoint of the verifier and meta-verifier; default: model.path, as the generator"""
    meta_verifier_urls: Array[str] = ()
    """running engine servers with the weights that the verifier starts from, which sample as the meta-verifier in place of this
    process, such as `http://127.0.0.1:8001`; their key is $NMOE_ENGINE_KEY"""
    train: bool = False
    """train verifier and generator at the end of each round"""
    rounds: int = Field(default=1, gt=0)
    """rounds of generation, each followed by training"""
    generator_steps: int = Field(default=2, gt=0)
    """optimizer steps of the generator per round, each on a part of the problems, during the first steps of the verifier"""
    verifier_epochs: int = Field(default=1, gt=0)
    """passes over a round's accepted verifications"""

    def conflicts(self) -> Iterator[Conflict]:
        if (problem := fault_of_urls(self.meta_verifier_urls)) is not None:
            yield Conflict("meta_verifier_urls", problem)
        if self.confirmations > self.verifications:
            yield Conflict(
                "confirmations",
                f"are more than the verifications = {self.verifications}, so no score could be accepted",
            )
        if self.rounds > 1 and not self.train:
            yield Conflict("rounds", "only differ if training happens between them; set train, or raise max_problems")
