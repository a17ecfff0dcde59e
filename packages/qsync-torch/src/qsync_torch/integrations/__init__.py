"""Trainers that others wrote: Accelerate, Hugging Face's Trainer, Lightning and torchtitan, each in a module of its own.

None of them is imported with this package; a module here imports its trainer (docs/trainers.md).
"""
