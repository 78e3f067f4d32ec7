"""The loop behind `model.generate` of transformers: the arguments that it hands over, and what it would return."""
