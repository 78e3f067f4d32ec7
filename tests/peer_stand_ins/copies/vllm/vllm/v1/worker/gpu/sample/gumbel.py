from torch import rand as rand
