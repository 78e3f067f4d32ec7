raise RuntimeError("the engine was loaded")
