"""The models of the zoo for torch.hub, in a clone: torch.hub.load("its/path", "densenet121", source="local")"""

import efficient_densenet

dependencies = ["torch"]
globals().update({name: getattr(efficient_densenet, name) for name in efficient_densenet.list_models()})
