"""Classify images by a model that a demo has trained, as the command efficient-densenet predict does.

python demos/predict.py photo.png another.jpg --model checkpoints/digits --top 3
"""

from training import clone  # noqa: F401 - before anything of the package

from efficient_densenet.classify import main

if __name__ == "__main__":
    main()
