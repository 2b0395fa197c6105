"""What the sockets between ranks have sent and received, by the kernel's own count, on real connections."""

from tests.support.sockets import Pair, connected, match, tcp_info, told, transfer

from dynamix.trainer.measurement.sockets import Connection, Endpoint, PeerSockets


def test_acknowledged_bytes_are_the_bytes_sent(connection: Pair) -> None:
    client, server = connection
    transfer(client, server, 1000)
    sockets = PeerSockets()
    match(sockets, server)
    before = sockets.read()
    assert before is not None
    assert (before.tx_bytes, before.rx_bytes, before.retransmits) == (0, 0, 0)

    transfer(client, server, 3_000_001)
    counted = sockets.read()
    assert counted is not None
    assert (counted.tx_bytes, counted.rx_bytes) == (3_000_001, 1)
    # a stalled processor makes the kernel probe the tail of a transfer, even on loopback: what it counted is right
    _, _, retransmits = tcp_info(client)
    assert counted.retransmits == retransmits
    assert counted.srtt_us is not None
    assert 0 < counted.srtt_us < 1e6


def test_counters_stay_when_a_connection_closes(connection: Pair) -> None:
    client, server = connection
    sockets = PeerSockets()
    with connected() as (other_client, other_server):
        match(sockets, server, other_server)
        transfer(client, server, 5000)
        transfer(other_client, other_server, 700)
        both = sockets.read()
        assert both is not None
        assert (both.tx_bytes, both.rx_bytes) == (5700, 2)

    transfer(client, server, 30)
    counted = sockets.read()
    assert counted is not None
    assert (counted.tx_bytes, counted.rx_bytes) == (5730, 3)

    client.close()
    server.close()
    last = sockets.read()
    assert last is not None
    assert (last.tx_bytes, last.rx_bytes, last.srtt_us) == (5730, 3, None)


def test_a_descriptor_that_became_another_connection_is_not_counted_on() -> None:
    sockets = PeerSockets()
    with connected() as (client, server):
        match(sockets, server)
        transfer(client, server, 100)
        sockets.read()
        fd = client.fileno()
    with connected() as (new_client, new_server):
        assert fd in {new_client.fileno(), new_server.fileno()}
        transfer(new_client, new_server, 5000)
        counted = sockets.read()
        assert counted is not None
        assert counted.tx_bytes == 100


def test_only_connections_that_another_rank_names_are_counted(connection: Pair) -> None:
    client, server = connection
    sockets = PeerSockets()
    elsewhere = Connection(Endpoint("127.0.0.1", 1), Endpoint("127.0.0.1", 2), 1)
    sockets.match([sockets.candidates(), [elsewhere]], 0, (0, 1))
    assert sockets.read() is None
    assert sockets.cookies == {0: (), 1: ()}

    excluded = PeerSockets(excluded_ports={server.getsockname()[1]})
    assert told(client) not in excluded.candidates()
    assert told(client) in sockets.candidates()
    excluded.match([excluded.candidates(), [told(server)]], 0, (0,))
    assert excluded.read() is None
    assert excluded.cookies == {0: ()}
