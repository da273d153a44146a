"""An Ollama Modelfile, and the variables of its server that a Modelfile cannot hold."""

from __future__ import annotations

from anaphora.planning.emit.llama_server import gguf_file, kv_types
from anaphora.planning.emit.render import comment, header
from anaphora.planning.llama_cpp import DEFAULT_UBATCH
from anaphora.planning.settings import PlanSettings


class OllamaModelfile:
    """`ollama create NAME -f Modelfile`."""

    name = "ollama-modelfile"
    engine = "ollama"

    def render(self, settings: PlanSettings) -> str:
        name = settings.model.rstrip("/").rpartition("/")[2].removesuffix(".gguf").lower()
        top = header(settings, "Ollama", f"Use: ollama create {name} -f Modelfile")
        keys, _ = kv_types(settings)
        variables = {
            "OLLAMA_NUM_PARALLEL": (str(settings.max_num_seqs), f"slots. {settings.why['max_num_seqs']}"),
            "OLLAMA_KV_CACHE_TYPE": (keys, f"keys and values. {settings.why['kv_cache_dtype']}"),
        }
        if keys != "f16":
            variables["OLLAMA_FLASH_ATTENTION"] = ("1", "a quantised KV cache needs it")
        batch = settings.max_num_batched_tokens or DEFAULT_UBATCH
        text = top + comment("The server's own variables, set before `ollama serve`; a Modelfile cannot hold them:")
        for key, (value, why) in variables.items():
            text += comment(f"  {key}={value}  {why}.")
        text += "\n" + comment("your file of the model, or a name that `ollama list` shows.")
        text += f"FROM {_source(settings.model)}\n"
        text += comment(
            f"{settings.why['max_model_len']}. Tokens of one slot: Ollama allots it once for each slot, and without it "
            "cuts prompts to its own default."
        )
        text += f"PARAMETER num_ctx {settings.max_model_len}\n"
        text += comment("tokens of a step; they size the compute buffer.")
        return text + f"PARAMETER num_batch {batch}\n"


def _source(model: str) -> str:
    if model.endswith(".gguf") or "/" in model:
        file = gguf_file(model)
        return file if "/" in file else f"./{file}"
    return model
