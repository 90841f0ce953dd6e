"""Classify images with a model that a demo has trained.

python demos/predict.py photo.png another.jpg --model checkpoints/digits --top 3
"""

from training import command, predict

if __name__ == "__main__":
    command(predict)
