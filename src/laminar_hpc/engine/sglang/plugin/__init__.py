"""What runs inside the SGLang processes: our platform for machines without a GPU, the engine port, and the
launcher.

SGLang finds `platform.activate` and `hooks.register` through the entry points that setup.py declares; its own
files stay untouched.
"""
