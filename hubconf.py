"""The models of the zoo for torch.hub: torch.hub.load("OWNER/efficient_densenet", "densenet121", num_classes=14)"""

import efficient_densenet

dependencies = ["torch"]
globals().update({name: getattr(efficient_densenet, name) for name in efficient_densenet.list_models()})
