"""The in-process engine. Importing this package loads neither torch nor a model."""
