"""Models of transformers placed by a device map: ``models.py device_map|offload|pipeline FOLDER``."""

from __future__ import annotations

import json
import sys

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    pipeline,
)


def saved(folder):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=63, pad_token_id=0, bos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(f"{folder}/model", max_shard_size="30KB")
    return f"{folder}/model"


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{index}": index for index in range(64)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0", pad_token="w0", eos_token="w63")


def generated(model):
    ids = torch.arange(2, 10)[None]
    return model.generate(ids, max_new_tokens=8, do_sample=False).tolist()


def device_map(folder):
    model = AutoModelForCausalLM.from_pretrained(saved(folder), device_map="auto")
    placed = getattr(model, "hf_device_map", {})  # where several devices are used
    return {"map": {key: str(value) for key, value in placed.items()}, "ids": generated(model)}


def offload(folder):
    model = AutoModelForCausalLM.from_pretrained(
        saved(folder), device_map="auto", max_memory={"cpu": "60KB"}, offload_folder=f"{folder}/offload"
    )
    model.save_pretrained(f"{folder}/again")
    again = AutoModelForCausalLM.from_pretrained(f"{folder}/again")
    places = {str(value) for value in model.hf_device_map.values()}
    return {"places": sorted(places), "ids": generated(model), "again": generated(again)}


def through_a_pipeline(folder):
    generate = pipeline("text-generation", model=saved(folder), tokenizer=tokenizer(), device_map="auto")
    return {"text": generate("w5 w6 w7", max_new_tokens=5, do_sample=False)}


if __name__ == "__main__":
    what = {"device_map": device_map, "offload": offload, "pipeline": through_a_pipeline}
    print("RESULT", json.dumps(what[sys.argv[1]](sys.argv[2])))
