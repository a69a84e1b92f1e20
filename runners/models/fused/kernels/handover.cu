// The two ends of a decode graph. Its first kernel fetches the step's inputs from pinned memory of the host,
// which the device reads over the bus; its last one leaves the sampled ids there. So the host calls the driver
// once a step, for the launch, and no copy engine stands between two graphs.
//
// What the host wrote since the last launch has to be seen, so no cache may serve the loads from its memory.

struct State {
    unsigned long long number;  // of the last ticket taken
    long long turn;             // its place among the images
    long long answer;           // where its ids go, or negative
};

// What else a ticket says, beside its number: the answer, and whether its image is in the target already.
constexpr long long ANSWER_MASK = 0xffffffff, IS_THERE = 1ll << 32;

// One CTA. Takes the oldest of up to 32 tickets, one an image, that was not taken yet: the one with the least number
// above that of the last one. If there is none, the target stays as it is.
extern "C" __global__ void fetch_inputs(
    uint4* target, const uint4* images, const longlong2* tickets, State* state, unsigned long long num_words,
    unsigned long long depth) {
    constexpr unsigned long long NONE = ~0ull;
    __shared__ long long found;
    __shared__ bool is_there;
    const unsigned word = threadIdx.x;
    // The turns go round, so the image is in all likelihood the next one: it comes along with the tickets, and not
    // after them. Warps may see the state before or after it changes: what counts is whether the guess was right.
    const long long guess = (static_cast<volatile State*>(state)->turn + 1) % static_cast<long long>(depth);
    uint4 first = {};
    if (word < num_words) first = __ldcv(images + guess * num_words + word);
    if (threadIdx.x < 32) {
        longlong2 ticket = {};
        if (threadIdx.x < depth) ticket = __ldcv(tickets + threadIdx.x);
        unsigned long long number = ticket.x;
        if (number <= state->number) number = NONE;
        unsigned long long least = number;
        for (int distance = 16; distance > 0; distance /= 2)
            least = min(least, __shfl_xor_sync(~0u, least, distance));
        if (threadIdx.x == 0 && least == NONE) found = -1;
        if (least != NONE && number == least) {
            found = threadIdx.x;
            is_there = ticket.y & IS_THERE;
            *state = {number, threadIdx.x, (ticket.y & ANSWER_MASK) - 1};
        }
    }
    __syncthreads();
    if (found < 0 || is_there) return;
    const uint4* image = images + found * num_words;
    if (word < num_words) target[word] = found == guess ? first : __ldcv(image + word);
    for (unsigned long long next = word + blockDim.x; next < num_words; next += blockDim.x)
        target[next] = __ldcv(image + next);
}

// One CTA. Writes the ids to the answer of the ticket that was taken last, once.
extern "C" __global__ void post_ids(
    long long* answers, const long long* ids, State* state, unsigned long long num_ids, unsigned long long stride) {
    const long long answer = state->answer;
    __syncthreads();
    if (threadIdx.x == 0) state->answer = -1;
    if (answer < 0) return;
    for (unsigned long long i = threadIdx.x; i < num_ids; i += blockDim.x) answers[answer * stride + i] = ids[i];
}
