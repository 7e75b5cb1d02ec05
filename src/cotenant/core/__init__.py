"""The nouns of the project as small immutable dataclasses. Nothing here imports torch or anything of ours."""
