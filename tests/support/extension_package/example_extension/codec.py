class ExampleCodec:
    pass
