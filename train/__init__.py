"""The training program of jaxcomm: `python -m train --config=configs/digits_resnet.py`."""
