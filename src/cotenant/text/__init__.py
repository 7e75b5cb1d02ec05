"""Text on one side, token ids on the other. Pure Python: no torch, no transformers.

A chat request comes as messages: ``chat`` renders them with the model's template, ``tokenizer`` turns the text into ids
for the worker. The worker's ids come back through ``detokenizer``, which never emits half a character, and ``stop``,
which cuts at stop strings. A training file goes through ``validation``, line by line; ``examples`` encodes each example
with the template that inference uses, ``spans`` finds what of it the assistant said, and the result is written where
the worker reads it.
"""
