"""What a model is: its spec, the decoder, and one file per family.

Importing this package registers every family file in it, by the same `register_family` that a user's module calls.
"""

from telamon.models import deepseek, gemma, gpt3, gpt_oss, llama, llama4, mistral, mixtral, olmo, qwen2, qwen3, qwen3_moe

__all__ = ["deepseek", "gemma", "gpt3", "gpt_oss", "llama", "llama4", "mistral", "mixtral", "olmo", "qwen2", "qwen3", "qwen3_moe"]
