"""Codes about sources, chat templates, rows of documents and built documents (E640-E656)."""

from __future__ import annotations

from typing import Final

from meshwright.base.codes.info import CodeInfo

CODES: Final[tuple[CodeInfo, ...]] = (
    CodeInfo(
        code="E640",
        title="The data has no source, or two",
        kind="input",
        why="a run reads either one path or several weighted sources",
        needs="data.path or data.sources, not both",
        do="remove one of the two, or give the other",
        page="""data.path names one source. data.sources names several with a weight each, as in
sources: {books.jsonl: 3, chat: 1}: three of four sequences come from the first, whatever the sizes are.""",
    ),
    CodeInfo(
        code="E641",
        title="The records do not fit what the run file says of them",
        kind="input",
        why="a stream has no borders between documents, and built documents have the form they were built with",
        needs="data.rows pack or pad for conversations and completions; data.format as the documents are",
        do="leave data.rows and data.format out, so that they follow from the records",
        page="""Conversations and completions carry a loss on answers only and must not see each other, so they are packed
or padded. Documents built by meshwright data build keep their form: text, chat or completion.""",
    ),
    CodeInfo(
        code="E642",
        title="There is no chat template that writes these messages",
        kind="input",
        why="how turns are written is part of the model, and another writing is another input",
        needs="chat_template in tokenizer_config.json, chat_template.jinja beside it, or data.chat_template",
        do="name a Jinja file in data.chat_template, or use the tokenizer of an instruct model",
        page="""Conversations are written by the tokenizer's own Jinja template, in a sandbox and without the date, so
that the same records give the same tokens every day. The message gives what the template or its reader answered: a
template may refuse roles in another order than it knows.""",
    ),
    CodeInfo(
        code="E643",
        title="The chat template does not say where an answer begins",
        kind="code",
        why="an answer is what stands behind the prompt that opens it; here the text with the answer begins otherwise",
        needs="a template whose text for n messages, with the head of an answer, begins its text for n + 1 messages",
        do="mark the answers in the template with {% generation %} blocks, or name another data.chat_template",
        page="""An answer is found by writing the conversation up to it, with and without it. Where the prompt does not
begin the conversation (the head of an answer holds something that the finished turn lacks), no part of the text can be
said to be the answer, unless the template marks it. A template that only rewrites earlier turns when the conversation
goes on is no such case: each answer becomes a sample of its own.""",
    ),
    CodeInfo(
        code="E644",
        title="A message contains a special token",
        kind="input",
        why="in a template's output it would be a control token: a message could end its own turn",
        needs="messages without the tokenizer's special tokens",
        do="remove it from the message, or write it in another way",
        page="""The template's output is read with special tokens on, because the template writes them itself. A message
that contains one would open or close turns. In plain text such words are text and stay so.""",
    ),
    CodeInfo(
        code="E645",
        title="A source's share rounds to nothing",
        kind="math",
        why="shares are kept exactly in every 4,096 sequences, and this one gets none of them",
        needs="a weight of at least 1/4096 of the sum",
        do="raise its weight, remove it, or put its text into another source",
        page="""In each block of 4,096 sequences every source of data.sources has a fixed number of them, by largest
remainder. The report of the run gives the shares that result.""",
    ),
    CodeInfo(
        code="E646",
        title="Documents are longer than a sequence",
        kind="input",
        why="cutting a conversation or a completion changes what is learned, so it is not done unasked",
        do="set data.too_long to truncate, split or skip, or raise data.seq_len",
        page="""With data.rows pack or pad a document of n tokens takes n - 1 places of a sequence. data.too_long says
what is done with longer ones: refuse (default for conversations and completions), truncate (keep the beginning), split
(default for text; positions begin again in each part) or skip. What was cut or skipped is counted in the report.""",
    ),
    CodeInfo(
        code="E647",
        title="No document has a token to predict",
        kind="math",
        why="a step without a predicted token has no loss, and its mean would be 0/0",
        needs="at least one document with a predicted token inside a sequence",
        do="check that records have answers, and that data.seq_len reaches beyond the prompts",
        page="""Only answers and completions carry a loss. Documents, or what truncation left of them, without one such
token are left out and counted (parts_without_loss in the report); here none is left.""",
    ),
    CodeInfo(
        code="E648",
        title="The tokenizer is not the one of the documents, or none is named",
        kind="math",
        why="token ids mean nothing without the tokenizer that made them",
        needs="one tokenizer for all sources and the model",
        do="name the tokenizer of the documents in data.tokenizer, or leave it out where documents bring their own",
        page="""Documents built by meshwright data build carry their tokenizer; a run with another data.tokenizer, or with
pretrained weights that bring another, is refused by comparing the files. Several sources need data.tokenizer, because
one trained on the first of them would not fit the others.""",
    ),
    CodeInfo(
        code="E650",
        title="The folder of built documents is incomplete or damaged",
        kind="input",
        why="a missing or cut file would train on other tokens than the manifest says",
        needs="manifest.json and every file it names, each of its length",
        do="run the same meshwright data build again: it writes what is missing",
        page="""manifest.json is written last; without it the build was interrupted, and the same command goes on where it
stood. Lengths are compared at every start; meshwright data verify reads every byte against the SHA-256.""",
    ),
    CodeInfo(
        code="E651",
        title="The folder holds documents of another build",
        kind="input",
        why="mixing shards of two builds would give a corpus that neither command describes",
        needs="an empty folder, or one of the same corpus, tokenizer and form",
        do="choose another --out, or remove the folder",
        page="""A build goes on in its folder only when the source files, their cut into shards, the form of the records
and the tokenizer are the same as before.""",
    ),
    CodeInfo(
        code="E652",
        title="Another process builds in this folder",
        kind="world",
        why="two builds would write the same files",
        needs="one build at a time in a folder",
        do="wait for it, or choose another --out",
        page="""The build holds a lock on .lock in its folder until it ends. A lock of a process that died is free.""",
    ),
    CodeInfo(
        code="E653",
        title="A process of the build was killed",
        kind="world",
        why="its shard is not written",
        needs="memory for each process: about four times the largest text of a shard's group",
        do="run the same command again, with fewer --jobs: what was written stays",
        page="""The system kills processes when memory runs out. Shards that were finished are kept, not built again.""",
    ),
    CodeInfo(
        code="E654",
        title="Packed documents do not run with this model family",
        kind="code",
        why="it is not shown for this family that documents in one row do not see each other",
        needs="a family of those for which it is tested",
        do="set data.rows to pad (one document a row) or stream",
        page="""Packing relies on the model to mask attention by document from the positions. That a packed row gives the
losses and gradients of its documents apart is tested for each family that is allowed. gpt-oss makes its masks without
the positions, so its documents would see each other.""",
    ),
    CodeInfo(
        code="W640",
        title="Packed documents need a mask of seq_len x seq_len",
        kind="cost",
        why="attention by document is masked explicitly, which takes memory and the fastest kernels do not skip",
        do="set data.rows to pad (one document a row) where documents are about as long as data.seq_len",
        page="""A row of several documents is attended under a mask of one byte for each pair of places. It is the same
for all heads and layers of a micro-batch. The prediction of memory and time does not know it.""",
    ),
    CodeInfo(
        code="W656",
        title="Packed documents over a context axis leave the fused kernel in part",
        kind="cost",
        why="kernels that give a log-sum-exp take no mask, so pieces in which documents meet are multiplied out",
        do="set data.rows to pad (one document a row) where documents are about as long as data.seq_len",
        page="""Rows are attended to in pieces of 1/64 of their length, at least 128 positions. Pieces without a common
document are skipped and those inside one take the device's fused kernel; where documents meet, scores are made some
queries at a time, with a mask that is never whole. The fewer documents to a row, the fewer such pieces. The prediction of
time counts all of a row as one document.""",
    ),
)
