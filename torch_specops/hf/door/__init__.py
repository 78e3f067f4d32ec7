"""The decoding loop as a `custom_generate` function of transformers: its arguments and outputs."""
