class ExampleLogger:
    pass
