"""Supervised fine-tuning: traces to conversations, and the trainer."""

from paravt.sft.trainer import SFTSetup, train

__all__ = ["SFTSetup", "train"]
