"""The model files that an engine imports at its start, in place of the 200 that SGLang would: it takes them
from SGLANG_EXTERNAL_MODEL_PACKAGE (models/registry.py:154).

An architecture that has no file here still works: SGLang then imports its own models, which takes some ten
seconds longer.
"""
