"""Several replicas of the server on Ray Serve, behind one endpoint.

    deploy.py         builds the application of Ray Serve, and runs it for `octavo serve --ray`
    endpoint.py       one deployment: HTTP, API keys and limits; relays each request to a replica
    replica.py        the other deployment: the front and the engine of one replica
    relay.py          the messages of a request and its reply between the two, over TCP
    prefix_router.py  the request router of Ray Serve that prefers a replica with cached KV
    prefix_index.py   which replica has computed which blocks of prompts
    scaling.py        the autoscaling policy of Ray Serve
    ray_options.py    the options

Ray places the replicas, checks their health, counts their requests and chooses one for each
request. The bytes of a reply do not pass through Ray. The page docs/ray.md describes the whole.
Only deploy.py and prefix_router.py import Ray.
"""
