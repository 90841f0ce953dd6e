"""The training of cp_demo.py through PyTorch's official checkpointing, to compare with.

python demos/original_demo.py
python demos/original_demo.py --data cifar --save model_official --batch_size 256

--efficient True (the default) is torch.utils.checkpoint around each layer, --efficient False the plain network.
"""

from functools import partial

from training import Options, command, train

if __name__ == "__main__":
    command(partial(train, efficient_engine="official"), Options, about=__doc__)
