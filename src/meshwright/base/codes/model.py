"""Codes about models and their config.json (E12x)."""

from __future__ import annotations

from typing import Final

from meshwright.base.codes.info import CodeInfo

CODES: Final[tuple[CodeInfo, ...]] = (
    CodeInfo(
        code="E120",
        title="Model not found",
        kind="input",
        needs="a folder with a config.json, such a file, or a name from `meshwright models`",
        why="a model is described by its Hugging Face config.json; weights are not needed to plan",
        do="check the path, or pick a name from `meshwright models`",
        page=(
            "MODEL is looked for in this order: a folder that holds a config.json, a JSON file, a name of the\n"
            "catalogue (letter case and an organisation prefix such as meta-llama/ do not matter). Nothing is\n"
            "downloaded: for a model that is not in the catalogue, put its config.json into a folder and give that\n"
            "folder. The message lists the catalogue names that look most like what was written."
        ),
    ),
    CodeInfo(
        code="E121",
        title="config.json cannot be read",
        kind="input",
        needs="a UTF-8 text file that holds one JSON object",
        why="every size of the model comes from this file",
        do="repair the file at the line and column named, or fetch it again",
        page=(
            "The file was found but is not a JSON object: it is cut short, holds a syntax error (a trailing comma,\n"
            "a single quote, a comment), is not text, or its top level is a list or a number. The message names the\n"
            "line and column where reading stopped. A file of three lines that starts with 'version https://git-lfs'\n"
            "is a pointer: fetch the real file."
        ),
    ),
    CodeInfo(
        code="E122",
        title="config.json lacks fields",
        kind="input",
        needs="every field named in the message",
        why="a missing size has no sane default: it would describe another model",
        do="add the fields to config.json",
        page=(
            "Fields with a true default (head_dim, tie_word_embeddings, a sliding window ...) may be left out; they\n"
            "take the value that transformers would take. The sizes that make the model (hidden size, number of\n"
            "layers, heads, width of the feed-forward, vocabulary, experts) may not, even where the library has a\n"
            "default, because that default is one particular model's. Families whose published config.json\n"
            "leave sizes out on purpose (Gemma-3) keep their defaults. All missing fields are listed at once."
        ),
    ),
    CodeInfo(
        code="E123",
        title="a field of config.json has a wrong type or size",
        kind="input",
        needs="whole numbers in a sensible range that fit each other",
        why="tensor shapes follow from these sizes",
        do="correct the field in config.json",
        page=(
            "Each size is checked alone (a whole number, above zero, below a generous limit) and against its\n"
            "neighbours: query heads must be a multiple of key/value heads, the hidden size a multiple of the heads\n"
            "where head_dim is absent, head_dim even where rotary positions are used, experts per token at most the\n"
            "number of experts, per-layer lists as long as the model is deep. All findings are listed at once; the\n"
            "limits (hidden size up to 2^20, 10,000 layers, vocabulary up to 2^24, 65,536 heads or experts) catch\n"
            "slips such as a size given twice in a row."
        ),
    ),
    CodeInfo(
        code="E124",
        title="model type not known",
        kind="code",
        needs="a model_type of a known family",
        why="the names and shapes of the tensors differ from family to family",
        do="use a known family; a Llama-shaped model can be described with model_type llama",
        page=(
            "The field model_type (or the first entry of architectures) names the family. Known families: GPT-2,\n"
            "Llama, Mistral, Qwen2 and 2.5, Qwen3, Gemma, Gemma-2, Gemma-3 (its text part), Phi-3, Granite, SmolLM3,\n"
            "OLMo 2 and 3, StarCoder2, GPT-NeoX (Pythia), Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2 and V3, gpt-oss,\n"
            "GLM-4 and 4.5, Command R (Cohere), StableLM, Phi, Falcon, Seed-OSS, ERNIE 4.5 (dense), OPT, BLOOM. Many\n"
            "are one of these under another name: if all tensor names agree, set model_type and architectures to that.\n"
            "Code that ships beside a config.json (auto_map) is never executed; the model is read as its family's\n"
            "standard module."
        ),
    ),
    CodeInfo(
        code="E125",
        title="variant of the family not built",
        kind="code",
        needs="the family's usual form",
        why="this variant has other tensors or another order of operations than the family's other models",
        do="use the usual form of the family",
        page=(
            "A few config fields switch a family to a form that only one or two old models use: cross-attention in\n"
            "GPT-2, a projected embedding or norms after the block in OPT (opt-350m), layers left out at random, a\n"
            "Gemma whose tokens see later ones, dropout of attention in Falcon. Reading them as the usual form would\n"
            "count and cut the wrong tensors, so they are refused by name."
        ),
    ),
)
