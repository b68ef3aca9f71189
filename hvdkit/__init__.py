"""hvdkit: one ResNet recipe under PyTorch, TensorFlow, Keras and MXNet over real Horovod.

Importing this package loads no framework, no Horovod and no plotting library.
"""

__version__ = "0.1.0"
