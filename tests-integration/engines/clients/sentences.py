"""A sentence-transformer of a small BERT, trained on made sentences: ``sentences.py pairs|scores FOLDER``."""

from __future__ import annotations

import json
import os
import sys

import torch
from datasets import Dataset
from models import tokenizer
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import (
    CosineSimilarityLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from trainer import history
from transformers import BertConfig, BertModel
from tuning import text


def encoder(folder):
    place = f"{folder}/bert-{os.environ.get('RANK', '0')}"
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=32,
    )  # fmt: skip
    BertModel(config).save_pretrained(place)
    tokenizer().save_pretrained(place)
    transformer = Transformer(place, max_seq_length=16)
    return SentenceTransformer(modules=[transformer, Pooling(32)], device="cpu")


def trained_on(columns, make_loss, folder, **options):
    model = encoder(folder)
    arguments = SentenceTransformerTrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=4, per_device_eval_batch_size=4, max_steps=4,
        learning_rate=1e-2, logging_steps=1, eval_strategy="steps", eval_steps=2, save_steps=4, report_to=[],
        disable_tqdm=True, seed=1, **options,
    )  # fmt: skip
    rows = Dataset.from_dict(columns)
    count = len(rows)
    trained = SentenceTransformerTrainer(
        model, arguments, train_dataset=rows.select(range(count - 7)),
        eval_dataset=rows.select(range(count - 7, count)), loss=make_loss(model),
    )  # fmt: skip
    trained.train()
    trained.accelerator.wait_for_everyone()
    loaded = SentenceTransformer(f"{folder}/checkpoint-4", device="cpu")
    vectors = loaded.encode([text(index, 6) for index in range(5)])
    return {"history": history(trained), "vectors": vectors.tolist()}


def pairs(folder):
    columns = {
        "anchor": [text(index, 4) for index in range(40)],
        "positive": [text(index + 1, 5) for index in range(40)],
    }
    return trained_on(columns, MultipleNegativesRankingLoss, folder, batch_sampler="no_duplicates")


def scores(folder):
    columns = {
        "first": [text(index, 4) for index in range(40)],
        "second": [text(index * 3 + 1, 5) for index in range(40)],
        "score": [(index % 10) / 10 for index in range(40)],
    }
    return trained_on(columns, CosineSimilarityLoss, folder)


if __name__ == "__main__":
    found = {"pairs": pairs, "scores": scores}[sys.argv[1]](sys.argv[2])
    from accelerate import PartialState

    if PartialState().is_main_process:
        print("RESULT", json.dumps(found))
