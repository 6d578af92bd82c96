"""Token ids of images and videos in tiny checkpoints. Ranks import them without transformers, which takes a second."""

IMAGE, VIDEO, START, END = 100, 101, 102, 103
