from torch_attnkit.cli import app

app(prog_name="python -m torch_attnkit")
