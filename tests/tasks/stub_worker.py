"""A child with the checker's protocol and none of its imports: tests of dying and hanging are quick."""

import json
import os
import sys
import time

print('{"ready": true}', flush=True)
for line in sys.stdin:
    request = json.loads(line)
    match request["answer"]:
        case "hang":
            time.sleep(1000)
        case "die":
            os._exit(3)
        case "fail":
            reply = {"error": "ValueError: as asked"}
        case "chatter":
            reply = {"id": -1, "equal": True}
        case answer:
            reply = {"equal": sorted(answer) == sorted(request["gold"])}
    print(json.dumps({"id": request["id"], **reply}), flush=True)
