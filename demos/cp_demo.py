"""Train a DenseNet with this package's memory-saving engines.

python demos/cp_demo.py                                           handwritten digits that ship with the package
python demos/cp_demo.py --data cifar --save model --batch_size 256     CIFAR-10, or a folder of your own images
python demos/cp_demo.py --save model --resume                          resume after an interruption
torchrun --nproc_per_node 2 demos/cp_demo.py --data cifar --sync_bn    in several processes

--efficient True (the default) takes the best engine that can run, --efficient False the plain network.
"""

from training import Options, command, train

if __name__ == "__main__":
    command(train, Options, about=__doc__)
