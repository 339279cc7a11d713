"""World models that are a Python function, which a language model wrote."""
