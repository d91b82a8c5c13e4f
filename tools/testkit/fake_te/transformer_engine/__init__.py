"""A stand-in for TransformerEngine, which needs an NVIDIA GPU: its public names and signatures, plain arithmetic.

Layers note what they were asked to do in `calls`. What is here follows the public documentation of version 2.0.
"""
