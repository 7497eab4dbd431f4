"""From a path to batches: corpus, tokenizer, token store, the global order, and each rank's rows of it."""

from meshwright.train.data.batches import (
    RankBatch,
    drawn_samples,
    eval_batches,
    rank_batch,
    synthetic_batch,
    synthetic_documents,
)
from meshwright.train.data.corpus import PYTHON_DOCS, Corpus, open_corpus
from meshwright.train.data.order import batch_samples, rank_rows, samples_at
from meshwright.train.data.prepare import check_data, prepare_data
from meshwright.train.data.store import TokenData, check_samples, open_tokens, prepare_tokens
from meshwright.train.data.stream import NO_LOSS, Rows, TokenStream, padded_row
from meshwright.train.data.tokenizer import TextTokenizer, load_tokenizer

__all__ = [
    "NO_LOSS",
    "PYTHON_DOCS",
    "Corpus",
    "RankBatch",
    "Rows",
    "TextTokenizer",
    "TokenData",
    "TokenStream",
    "batch_samples",
    "check_data",
    "check_samples",
    "drawn_samples",
    "eval_batches",
    "load_tokenizer",
    "open_corpus",
    "open_tokens",
    "padded_row",
    "prepare_data",
    "prepare_tokens",
    "rank_batch",
    "rank_rows",
    "samples_at",
    "synthetic_batch",
    "synthetic_documents",
]
