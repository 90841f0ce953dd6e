"""Classify pictures with a model that a demo has trained.

python demos/predict.py picture.png another.jpg --model checkpoints/digits --top 3
"""

from efficient_densenet.training import command, predict

if __name__ == "__main__":
    command(predict)
