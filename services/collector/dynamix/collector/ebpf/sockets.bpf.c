/* What the kernel keeps for the collector, by socket cookie. Two programs on a control group of version 2:
 *
 *   dynamix_ingress  (cgroup_skb)  every packet that reaches a socket: one look-up, three stores (docs/overhead.md)
 *   dynamix_sockets  (sock_ops)    a socket opens or closes, sends segments again, or has measured a round trip
 *
 * Only structures of the kernel's user interface are touched (__sk_buff, bpf_sock, bpf_tcp_sock, bpf_sock_ops): right
 * under any kernel's headers. Bytes are payload, as TCP_INFO counts it. What was sent is known by what the other side
 * acknowledged: a program on egress would also count what a local queue then drops.
 */
#include <uapi/linux/bpf.h>
#include <uapi/linux/in.h>
#include <uapi/linux/ip.h>
#include <uapi/linux/ipv6.h>
#include <uapi/linux/tcp.h>

#define UID_UNKNOWN ((u64)-1)
/* Bytes by which a packet may be ahead of TCP; of one that is further, TCP itself will tell, or it is no part of the
 * stream: the receive window is not known here. */
#define MOST_AHEAD (1 << 22)

struct counters { /* one line of the processor's cache */
    u64 cookie;       /* of the socket; 0 in a slot that is free */
    u64 uid;          /* of the socket's owner */
    u64 received_bytes; /* cumulative since the connection began, as all that follow */
    u64 acked_bytes;
    u64 retransmits; /* segments */
    u64 srtt_sum_us; /* of the smoothed round trip times, as they stood before each round trip but the first */
    u64 num_rtts;
    u64 unused;
};

struct segment {
    u32 end; /* sequence number after its payload */
    u32 ack;
    u32 has_ack;
};

/* A socket is in one of the NUM_WAYS slots that begin where its cookie says, nearly always in the first. The kernel's own
 * hash table costs 60 ns more (docs/overhead.md). BPF_F_MMAPABLE begins the array on a page's boundary, and so every slot
 * on a cache line's. Cookies are dealt out in runs to each processor; the factor (2^64 over the golden ratio) scatters
 * them, so that two runs cannot lie on one another. */
#define SCATTER 0x9e3779b97f4a7c15ULL
BPF_F_TABLE("array", u32, struct counters, sockets, MAX_OPEN, BPF_F_MMAPABLE);
/* The last word on those that closed of late: the collector comes once a window. */
BPF_TABLE("lru_hash", u64, struct counters, closed, MAX_CLOSED);
/* How many sockets found the table full. */
BPF_TABLE("array", u32, u64, left_out, 1);

static inline struct counters *find_slot(u64 cookie, u64 held)
{
#pragma unroll
    for (u32 way = 0; way < NUM_WAYS; way++) {
        u32 slot = ((cookie * SCATTER >> 32) + way) & (MAX_OPEN - 1);
        struct counters *counters = sockets.lookup(&slot);
        if (counters && counters->cookie == held)
            return counters;
    }
    return NULL;
}

static inline struct counters *find(u64 cookie)
{
    return find_slot(cookie, cookie);
}

static inline int read_segment(struct __sk_buff *skb, struct segment *segment)
{
    void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
    u8 *first = data;
    u32 offset;

    if ((void *)(first + sizeof(struct ipv6hdr)) > end)
        return 0; /* no TCP packet is shorter */
    if (*first >> 4 == 4) {
        if (((struct iphdr *)data)->protocol != IPPROTO_TCP)
            return 0;
        offset = (*first & 0xf) * 4;
    } else {
        if (((struct ipv6hdr *)data)->nexthdr != IPPROTO_TCP)
            return 0;
        offset = sizeof(struct ipv6hdr);
    }
    struct tcphdr *tcp = data + offset;
    if ((void *)(tcp + 1) > end || tcp->rst)
        return 0; /* what a reset numbers need not be of this stream */
    segment->end = bpf_ntohl(tcp->seq) + skb->len - offset - tcp->doff * 4;
    segment->ack = bpf_ntohl(tcp->ack_seq);
    segment->has_ack = tcp->ack;
    return 1;
}

static inline int is_connected(u32 state)
{
    return state == BPF_TCP_ESTABLISHED || (state >= BPF_TCP_FIN_WAIT1 && state <= BPF_TCP_FIN_WAIT2) ||
           state == BPF_TCP_CLOSE_WAIT || state == BPF_TCP_LAST_ACK || state == BPF_TCP_CLOSING;
}

int dynamix_ingress(struct __sk_buff *skb)
{
    u64 cookie = bpf_get_socket_cookie(skb);
    struct counters *counters = find(cookie);
    if (!counters)
        return 1;
    struct bpf_sock *sk = skb->sk;
    if (!sk)
        return 1;
    sk = bpf_sk_fullsock(sk);
    if (!sk || !is_connected(sk->state))
        return 1;
    struct bpf_tcp_sock *tcp = bpf_tcp_sock(sk);
    if (!tcp)
        return 1;
    /* TCP has not seen this packet yet, nor those before it that wait for the socket's user: we look ahead. */
    u64 received_bytes = tcp->bytes_received, acked_bytes = tcp->bytes_acked;
    struct segment segment = {};
    if (read_segment(skb, &segment)) {
        s32 ahead = segment.end - tcp->rcv_nxt;
        if (ahead > 0 && ahead < MOST_AHEAD)
            received_bytes += ahead;
        s32 acked = segment.ack - tcp->snd_una;
        if (segment.has_ack && acked > 0 && acked < MOST_AHEAD) /* snd_nxt is no bound: over loopback an answer comes before it moves */
            acked_bytes += acked;
    }
    /* Out of order the highest counts: TCP gets the rest too. No atomics: where two processors meet on one socket, the
     * next packet fixes it. */
    if (received_bytes > counters->received_bytes)
        counters->received_bytes = received_bytes;
    if (acked_bytes > counters->acked_bytes)
        counters->acked_bytes = acked_bytes;
    if (tcp->total_retrans > counters->retransmits)
        counters->retransmits = tcp->total_retrans; /* where another program took our callback's flag away */
    if (counters->uid == UID_UNKNOWN)
        counters->uid = bpf_get_socket_uid(skb);
    return 1;
}

/* Once a socket is established we ask again, beside what other programs have asked for: the flags are one word. */
static inline void ask(struct bpf_sock_ops *event)
{
    bpf_sock_ops_cb_flags_set(event, event->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_RETRANS_CB_FLAG |
                                         BPF_SOCK_OPS_RTT_CB_FLAG | BPF_SOCK_OPS_STATE_CB_FLAG);
}

static inline void on_open(struct bpf_sock_ops *event)
{
    u64 cookie = bpf_get_socket_cookie(event);
    struct counters fresh = {.cookie = cookie, .uid = UID_UNKNOWN};
    /* Where all ways are taken this socket is left out, and never drops another: its ranks' windows are then TCP_INFO's.
     * Where two processors claim one slot at once, the later has it. A socket that connects a second time begins again. */
    struct counters *slot = find(cookie);
    if (!slot)
        slot = find_slot(cookie, 0);
    if (slot) {
        *slot = fresh;
        ask(event);
        return;
    }
    u32 zero = 0;
    u64 *number = left_out.lookup(&zero);
    if (number)
        __sync_fetch_and_add(number, 1);
}

static inline void on_close(struct bpf_sock_ops *event)
{
    u64 cookie = bpf_get_socket_cookie(event);
    struct counters *counters = find(cookie);
    if (!counters)
        return;
    closed.update(&cookie, counters);
    counters->cookie = 0;
}

static inline void on_retransmission(struct bpf_sock_ops *event)
{
    u64 cookie = bpf_get_socket_cookie(event);
    struct counters *counters = find(cookie);
    /* The socket's own sum, to which args[1] segments have just been added. Stored rather than added to: so it may also
     * be read on ingress, and nothing is counted twice. */
    if (counters && event->total_retrans > counters->retransmits)
        counters->retransmits = event->total_retrans;
}

static inline void on_round_trip(struct bpf_sock_ops *event)
{
    u64 cookie = bpf_get_socket_cookie(event);
    struct counters *counters = find(cookie);
    if (!counters || !event->srtt_us)
        return; /* the call comes before the measurement is in: at the first one nothing is known yet */
    counters->srtt_sum_us += event->srtt_us >> 3; /* the kernel keeps eighths */
    counters->num_rtts += 1;
}

int dynamix_sockets(struct bpf_sock_ops *event)
{
    switch (event->op) {
    case BPF_SOCK_OPS_TCP_CONNECT_CB:
    case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
        on_open(event);
        break;
    case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
        ask(event);
        break;
    case BPF_SOCK_OPS_STATE_CB:
        if (event->args[1] == BPF_TCP_CLOSE)
            on_close(event);
        break;
    case BPF_SOCK_OPS_RETRANS_CB:
        on_retransmission(event);
        break;
    case BPF_SOCK_OPS_RTT_CB:
        on_round_trip(event);
        break;
    }
    return 1;
}
