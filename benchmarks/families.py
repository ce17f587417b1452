"""One tiny model per family, as a person would build it: (module, inputs by name), the loss inside.

Small enough to be captured and compared in seconds, complete enough to use every operator the family uses. Dropout is
off, so that eager and captured draw nothing; random weights from a seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Inputs = dict[str, torch.Tensor]
Made = tuple[nn.Module, Inputs]
VOCAB, LENGTH, ROWS = 96, 12, 5
_LM = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "use_cache": False}
_GATED = {**_LM, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 32}
_ENCODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_TWO_SIDED = {
    "vocab_size": VOCAB,
    "d_model": 32,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
    "dropout": 0.0,
    "use_cache": False,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}


def _tokens(length: int = LENGTH, rows: int = ROWS) -> torch.Tensor:
    return torch.randint(4, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


def _images(channels: int = 3, size: int = 32) -> torch.Tensor:
    return torch.randn(ROWS, channels, size, size, generator=torch.Generator().manual_seed(2))


def _classes(count: int = 10) -> torch.Tensor:
    return torch.arange(ROWS) % count


def _hf(model_type: str, head: str = "AutoModelForCausalLM", **config: Any) -> nn.Module:
    import transformers

    made: Any = transformers.AutoConfig.for_model(model_type, **config)
    torch.manual_seed(0)
    module: nn.Module = getattr(transformers, head).from_config(made)
    return module


def _causal(model_type: str, **config: Any) -> Made:
    ids = _tokens()
    return _hf(model_type, **config), {"input_ids": ids, "labels": ids}


def _masked(model_type: str, **config: Any) -> Made:
    ids = _tokens()
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    return _hf(model_type, "AutoModelForMaskedLM", **config), {"input_ids": ids, "attention_mask": mask, "labels": ids}


def gpt2() -> Made:
    return _causal(
        "gpt2",
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=32,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )


def opt() -> Made:
    return _causal(
        "opt", **_LM, ffn_dim=64, max_position_embeddings=32, word_embed_proj_dim=32, dropout=0.0, attention_dropout=0.0
    )


def gpt_neox() -> Made:
    return _causal("gpt_neox", **_LM, intermediate_size=64, max_position_embeddings=32)


def bloom() -> Made:
    return _causal("bloom", vocab_size=VOCAB, hidden_size=32, n_layer=3, n_head=4, use_cache=False, pad_token_id=3)


def mixtral() -> Made:
    return _causal("mixtral", **_GATED, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)


def qwen3_moe() -> Made:
    return _causal("qwen3_moe", **_GATED, head_dim=8, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2)


def _seq2seq(model_type: str, **config: Any) -> Made:
    labels = _tokens(8)
    return _hf(model_type, "AutoModelForSeq2SeqLM", **config), {"input_ids": _tokens(), "labels": labels}


def t5() -> Made:
    return _seq2seq(
        "t5",
        vocab_size=VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )


def bart() -> Made:
    return _seq2seq("bart", **_TWO_SIDED, max_position_embeddings=32, forced_eos_token_id=2)


def whisper() -> Made:
    positions = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
    suppressed = {"suppress_tokens": None, "begin_suppress_tokens": None}
    module = _hf("whisper", "AutoModelForSpeechSeq2Seq", **_TWO_SIDED, **positions, **suppressed)
    mel = torch.randn(ROWS, 8, 32, generator=torch.Generator().manual_seed(3))
    return module, {"input_features": mel, "labels": _tokens(8)}


def _image_classifier(model_type: str, size: int = 32, **config: Any) -> Made:
    module = _hf(model_type, "AutoModelForImageClassification", num_labels=10, **config)
    return module, {"pixel_values": _images(size=size), "labels": _classes()}


def vit() -> Made:
    config = {k: v for k, v in _ENCODER.items() if k not in ("vocab_size", "max_position_embeddings")}
    return _image_classifier("vit", **config, image_size=32, patch_size=8)


def resnet18() -> Made:
    shape = {"embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [2, 2, 2, 2], "layer_type": "basic"}
    return _image_classifier("resnet", **shape)


def resnet101() -> Made:
    shape = {"embedding_size": 8, "hidden_sizes": [16, 16, 32, 32], "depths": [3, 4, 23, 3]}
    return _image_classifier("resnet", **shape, layer_type="bottleneck")


def convnext() -> Made:
    return _image_classifier("convnext", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1])


class _Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        self.clip = _hf(
            "clip",
            "AutoModel",
            projection_dim=16,
            text_config={
                **tower,
                "vocab_size": VOCAB,
                "max_position_embeddings": 32,
                "eos_token_id": VOCAB - 1,
            },
            vision_config={**tower, "image_size": 32, "patch_size": 8},
        )

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
        logits = self.clip(input_ids=input_ids, pixel_values=pixel_values).logits_per_text
        target = torch.arange(logits.shape[0])  # the model's own loss says len(logits), which fixes the batch size
        return (functional.cross_entropy(logits, target) + functional.cross_entropy(logits.t(), target)) / 2


def clip() -> Made:
    return _Clip(), {"input_ids": _tokens(), "pixel_values": _images()}


def _block(channels_in: int, channels_out: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1),
        nn.GroupNorm(4, channels_out),
        nn.SiLU(),
        nn.Conv2d(channels_out, channels_out, 3, padding=1),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )


class _UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = _block(3, width), _block(width, 2 * width), _block(2 * width, 4 * width)
        self.up = nn.ConvTranspose2d(4 * width, 4 * width, 2, 2)
        self.up2, self.up1 = _block(6 * width, 2 * width), _block(3 * width, width)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, image: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        first = self.down1(image)
        second = self.down2(functional.max_pool2d(first, 2))
        bottom = self.bottom(functional.max_pool2d(second, 2))
        x = self.up2(torch.cat([self.up(bottom), second], 1))
        x = self.up1(torch.cat([functional.interpolate(x, scale_factor=2, mode="bilinear"), first], 1))
        return functional.cross_entropy(self.head(x), target)


def unet() -> Made:
    torch.manual_seed(0)
    target = torch.randint(0, 2, (ROWS, 32, 32), generator=torch.Generator().manual_seed(4))
    return _UNet(), {"image": _images(), "target": target}


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, 32), nn.Parameter(torch.randn(1, 32, 32) * 0.02)
        self.core = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, VOCAB)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        given, wanted = target[:, :-1], target[:, 1:]
        mask = torch.full((given.shape[1], given.shape[1]), float("-inf")).triu(1).to(self.place.dtype)
        a = self.embed(source) + self.place[:, : source.shape[1]]
        b = self.embed(given) + self.place[:, : given.shape[1]]
        return functional.cross_entropy(self.head(self.core(a, b, tgt_mask=mask)).transpose(1, 2), wanted)


def torch_transformer() -> Made:
    torch.manual_seed(0)
    return _Transformer(), {"source": _tokens(), "target": _tokens(9)}


class _LstmLm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.core, self.head = (
            nn.Embedding(VOCAB, 32),
            nn.LSTM(32, 32, 2, batch_first=True),
            nn.Linear(32, VOCAB),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.core(self.embed(tokens[:, :-1]))
        return functional.cross_entropy(self.head(hidden).transpose(1, 2), tokens[:, 1:])


def lstm() -> Made:
    torch.manual_seed(0)
    return _LstmLm(), {"tokens": _tokens()}


def _lora(made: Made, targets: list[str], fan_in_fan_out: bool) -> Made:
    from peft import LoraConfig, get_peft_model

    module, inputs = made
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, lora_dropout=0.0, fan_in_fan_out=fan_in_fan_out)
    adapted: Any = get_peft_model(module, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return adapted, inputs


FAMILIES: dict[str, Callable[[], Made]] = {
    "gpt2": gpt2,
    "llama": lambda: _causal("llama", **_GATED),
    "mistral": lambda: _causal("mistral", **_GATED, sliding_window=8),
    "qwen2": lambda: _causal("qwen2", **_GATED),
    "qwen3": lambda: _causal("qwen3", **_GATED, head_dim=8),
    "gemma2": lambda: _causal("gemma2", **_GATED, head_dim=8, sliding_window=8),
    "phi": lambda: _causal(
        "phi", **_LM, intermediate_size=64, max_position_embeddings=32, resid_pdrop=0.0, embd_pdrop=0.0
    ),
    "opt": opt,
    "gpt-neox": gpt_neox,
    "bloom": bloom,
    "mixtral": mixtral,
    "qwen3-moe": qwen3_moe,
    "bert": lambda: _masked("bert", **_ENCODER),
    "roberta": lambda: _masked("roberta", **_ENCODER),
    "distilbert": lambda: _masked(
        "distilbert",
        vocab_size=VOCAB,
        dim=32,
        n_layers=3,
        n_heads=4,
        hidden_dim=64,
        max_position_embeddings=32,
        dropout=0.0,
        attention_dropout=0.0,
    ),
    "t5": t5,
    "bart": bart,
    "vit": vit,
    "clip": clip,
    "whisper": whisper,
    "resnet-18": resnet18,
    "resnet-101": resnet101,
    "convnext": convnext,
    "unet": unet,
    "torch-transformer": torch_transformer,
    "lstm": lstm,
    "lora-gpt2": lambda: _lora(gpt2(), ["c_attn"], True),
    "lora-llama": lambda: _lora(_causal("llama", **_GATED), ["q_proj", "v_proj"], False),
}
