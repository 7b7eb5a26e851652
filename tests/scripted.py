"""What the scripted contexts of workflow tests share."""

import inspect
from typing import Any


class ScriptedTools:
    """Tools of a scripted context: `search` is its method `retrieve`, every other tool the method of that name."""

    async def tool(self, name: str, **arguments: Any) -> Any:
        result = getattr(self, "retrieve" if name == "search" else name)(**arguments)
        return await result if inspect.isawaitable(result) else result
