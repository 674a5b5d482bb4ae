/* A decode step of a model of Llama's kind, from tokens to logits: one token for each of several sequences.

   It computes what transformers' modules compute, operation by operation, and in bfloat16 rounds where they do. Between
   operations values are float32, also those that bfloat16 could hold. */

#include <math.h>

#include "linear.h"
#include "low_rank.h"
#include "threads.h"
#include "vectors.h"

enum place { QUERY, KEY, VALUE, OUTPUT, GATE, UP, DOWN, PLACES };

typedef struct {
    linear_t linear[PLACES];
    const void *before_attention, *before_mlp, *of_query, *of_key; /* weights of norms; NULL: none */
    int64_t keys, values;                                         /* where they begin in a block, in elements */
} layer_t;

typedef struct {
    int32_t layers, hidden, inner, heads, kv_heads, head, vocabulary, bf16;
    float epsilon, scaling, rotary_scaling;
    const void *embedding, *last_norm;
    const float *frequencies; /* [head / 2] */
    linear_t last;
    const layer_t *layer;
    void *kv;
    int64_t unit; /* elements between rows of the views of KV */
    int64_t block;
    int32_t block_tokens;
} model_t;

/* Of each row: its token, its position, and where its units begin among `units`. */
typedef struct {
    int32_t rows, threads;
    const int64_t *tokens, *positions, *first_unit, *units;
    void *logits; /* [rows, vocabulary], in the model's type */
    void *scratch;
    const change_t *const *changes; /* [rows] of [layers, PLACES]; NULL: no row has an adapter */
} step_t;

/* Raised with every change of what Python calls here: what was built of older sources is not called. */
int aegis_interface_3;

/* Whether this processor has all that is used here, in instructions that all have. Nothing may run before, so nothing
   here runs when it is loaded. */
__attribute__((target("arch=x86-64"))) int aegis_supported(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16") &&
           __builtin_cpu_supports("avx512vbmi");
}

/* Once, where it is supported. */
void aegis_set_up(void) { set_up_products(); }

typedef struct {
    const model_t *model;
    const step_t *step;
    float *hidden, *normed, *query, *key, *value, *mixed, *gate, *up, *cosines, *sines, *scores;
    int64_t scores_each; /* of a thread's task */
    input_t input;
} run_t;

static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static void *taken(char **from, int64_t bytes) {
    void *here = *from;
    *from += (bytes + 63) / 64 * 64;
    return here;
}

/* Cuts the scratch memory up; from NULL, what is returned are the bytes needed. */
static int64_t cut(run_t *run, const model_t *m, int64_t rows, int64_t positions, char *scratch) {
    char *at = scratch;
    int64_t wide = most(most(m->hidden, m->inner), (int64_t)m->heads * m->head), f = sizeof(float);
    run->hidden = taken(&at, rows * m->hidden * f);
    run->normed = taken(&at, rows * wide * f);
    run->query = taken(&at, rows * m->heads * m->head * f);
    run->key = taken(&at, rows * m->kv_heads * m->head * f);
    run->value = taken(&at, rows * m->kv_heads * m->head * f);
    run->mixed = taken(&at, most(rows * m->hidden, rows * m->vocabulary) * f);
    run->gate = taken(&at, rows * m->inner * f);
    run->up = taken(&at, rows * m->inner * f);
    run->cosines = taken(&at, rows * m->head / 2 * f);
    run->sines = taken(&at, rows * m->head / 2 * f);
    run->scores_each = (positions + 15) / 16 * 16 * (m->heads / m->kv_heads);
    run->scores = taken(&at, rows * m->kv_heads * run->scores_each * f);
    run->input.halves = taken(&at, halves_bytes(rows, wide));
    run->input.bytes = taken(&at, digits_bytes(rows, wide, 3));
    run->input.units = taken(&at, rows * f);
    run->input.sums = taken(&at, rows * 3 * f);
    run->input.group_sums = taken(&at, rows * (wide / 32 + 1) * f);
    return at - scratch;
}

int64_t aegis_scratch_bytes(const model_t *model, int64_t rows, int64_t positions) {
    run_t run;
    return cut(&run, model, rows, positions, (char *)0) + 64;
}

static void normalise(const float *from, float *to, const void *weight, int64_t rows, int width, const model_t *m) {
    for (int64_t row = 0; row < rows; row++, from += width, to += width) {
        __m512 squares = _mm512_setzero_ps();
        for (int k = 0; k < width; k += 16) {
            __m512 x = _mm512_loadu_ps(from + k);
            squares = _mm512_fmadd_ps(x, x, squares);
        }
        float mean = _mm512_reduce_add_ps(squares) / (float)width;
        __m512 factor = _mm512_set1_ps(1.0f / sqrtf(mean + m->epsilon));
        for (int k = 0; k < width; k += 16) {
            __m512 x = rounded(_mm512_mul_ps(_mm512_loadu_ps(from + k), factor), m->bf16);
            _mm512_storeu_ps(to + k, rounded(_mm512_mul_ps(x, loaded(weight, k, m->bf16)), m->bf16));
        }
    }
}

static void feed(run_t *run, const float *floats, int columns, const linear_t *first) {
    run->input.rows = run->step->rows;
    run->input.columns = columns;
    run->input.floats = (float *)floats;
    prepare(&run->input, first, run->model->bf16);
}

static void product(run_t *run, const linear_t *linear, float *out) {
    multiply(linear, &run->input, out, run->model->bf16, run->step->threads);
}

/* Of a layer, with what adapters add. */
static void changed_product(run_t *run, const layer_t *layer, enum place place, float *out) {
    const model_t *m = run->model;
    const step_t *step = run->step;
    const linear_t *linear = &layer->linear[place];
    product(run, linear, out);
    if (step->changes)
        aegis_add_changes(step->changes, (layer - m->layer) * PLACES + place, run->input.floats, out, step->rows,
                          linear->columns, linear->rows, m->bf16 ? ROUNDED : FLOATS, step->threads);
}

static void add(float *to, const float *from, int64_t count, int bf16) {
    for (int64_t at = 0; at < count; at += 16) {
        __m512 sum = _mm512_add_ps(_mm512_loadu_ps(to + at), _mm512_loadu_ps(from + at));
        _mm512_storeu_ps(to + at, rounded(sum, bf16));
    }
}

/* gate * sigmoid(gate) * up, in `gate`. */
static void gate_up(float *gate, const float *up, int64_t count, int bf16) {
    const __m512 one = _mm512_set1_ps(1.0f);
    for (int64_t at = 0; at < count; at += 16) {
        __m512 x = _mm512_loadu_ps(gate + at);
        __m512 below = _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), x)));
        __m512 active = rounded(_mm512_div_ps(x, below), bf16);
        _mm512_storeu_ps(gate + at, rounded(_mm512_mul_ps(active, _mm512_loadu_ps(up + at)), bf16));
    }
}

static float plain(float x, int bf16) { return bf16 ? _mm512_cvtss_f32(rounded(_mm512_set1_ps(x), 1)) : x; }

static void find_angles(run_t *run) {
    const model_t *m = run->model;
    const int half = m->head / 2;
    for (int row = 0; row < run->step->rows; row++)
        for (int k = 0; k < half; k++) {
            float angle = (float)run->step->positions[row] * m->frequencies[k];
            run->cosines[row * half + k] = plain(cosf(angle) * m->rotary_scaling, m->bf16);
            run->sines[row * half + k] = plain(sinf(angle) * m->rotary_scaling, m->bf16);
        }
}

static void rotate(run_t *run, float *x, int heads) {
    const int half = run->model->head / 2, bf16 = run->model->bf16;
    for (int row = 0; row < run->step->rows; row++)
        for (int head = 0; head < heads; head++, x += 2 * half)
            for (int k = 0; k < half; k += 8) {
                __m512 cosine = _mm512_castps256_ps512(_mm256_loadu_ps(run->cosines + row * half + k));
                __m512 sine = _mm512_castps256_ps512(_mm256_loadu_ps(run->sines + row * half + k));
                __m512 a = _mm512_castps256_ps512(_mm256_loadu_ps(x + k));
                __m512 b = _mm512_castps256_ps512(_mm256_loadu_ps(x + half + k));
                __m512 first = _mm512_sub_ps(rounded(a * cosine, bf16), rounded(b * sine, bf16));
                __m512 second = _mm512_add_ps(rounded(b * cosine, bf16), rounded(a * sine, bf16));
                _mm256_storeu_ps(x + k, _mm512_castps512_ps256(rounded(first, bf16)));
                _mm256_storeu_ps(x + half + k, _mm512_castps512_ps256(rounded(second, bf16)));
            }
}

static char *unit_at(const run_t *run, int row, int64_t block) {
    int64_t unit = run->step->units[run->step->first_unit[row] + block];
    return (char *)run->model->kv + unit * run->model->unit * (run->model->bf16 ? 2 : 4);
}

/* Writes K and V of this position, and zeros a block that it begins. */
static void cache(const run_t *run, const layer_t *layer, int clears) {
    const model_t *m = run->model;
    const int64_t width = (int64_t)m->kv_heads * m->head;
    const int itemsize = m->bf16 ? 2 : 4;
    for (int row = 0; row < run->step->rows; row++) {
        int64_t position = run->step->positions[row], within = position % m->block_tokens;
        char *block = unit_at(run, row, position / m->block_tokens);
        if (clears && within == 0) memset(block, 0, m->block * itemsize);
        char *to[2] = {block + (layer->keys + within * width) * itemsize,
                       block + (layer->values + within * width) * itemsize};
        const float *from[2] = {run->key + row * width, run->value + row * width};
        for (int which = 0; which < 2; which++) {
            if (!m->bf16) memcpy(to[which], from[which], width * sizeof(float));
            for (int64_t k = 0; m->bf16 && k < width; k += 16)
                store_halves((uint16_t *)to[which] + k, _mm512_loadu_ps(from[which] + k));
        }
    }
}

/* exp(scores - their largest), and 1 over their sum. */
static float soften(float *scores, int64_t count) {
    int64_t whole = (count + 15) / 16 * 16;
    for (int64_t at = count; at < whole; at++) scores[at] = -INFINITY;
    __m512 largest = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int64_t at = 0; at < whole; at += 16) largest = _mm512_max_ps(largest, _mm512_loadu_ps(scores + at));
    largest = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
    for (int64_t at = 0; at < whole; at += 16) {
        __m512 weight = exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + at), largest));
        _mm512_storeu_ps(scores + at, weight);
        sum = _mm512_add_ps(sum, weight);
    }
    for (int64_t at = count; at < whole; at++) sum = _mm512_sub_ps(sum, _mm512_maskz_loadu_ps(1, scores + at));
    return 1.0f / _mm512_reduce_add_ps(sum);
}

typedef struct {
    const run_t *run;
    const layer_t *layer;
} attention_t;

INLINE void score(const float *query, const char *keys, float *scores, int64_t each, int64_t at, const int group,
                  const model_t *m) {
    const int head = m->head, bf16 = m->bf16;
    __m512 sums[4];
    for (int g = 0; g < group; g++) sums[g] = _mm512_setzero_ps();
    for (int k = 0; k < head; k += 16) {
        __m512 key = loaded(keys, k, bf16);
        for (int g = 0; g < group; g++)
            sums[g] = _mm512_fmadd_ps(key, _mm512_loadu_ps(query + g * head + k), sums[g]);
    }
    for (int g = 0; g < group; g++) scores[g * each + at] = _mm512_reduce_add_ps(sums[g]) * m->scaling;
}

INLINE void weigh(const float *weights, int64_t each, const char *values, int64_t stride, __m512 (*sums)[4],
                  int64_t count, const int group, const int vectors, int bf16) {
    for (int64_t at = 0; at < count; at++, values += stride)
        for (int v = 0; v < vectors; v++) {
            __m512 value = loaded(values, 16 * v, bf16);
            for (int g = 0; g < group; g++)
                sums[g][v] = _mm512_fmadd_ps(value, _mm512_set1_ps(weights[g * each + at]), sums[g][v]);
        }
}

/* Up to four heads that share K and V. */
INLINE void attend_some(const attention_t *a, int row, int kv_head, int first, float *scores, const int group,
                        const int vectors) {
    const run_t *run = a->run;
    const model_t *m = run->model;
    const int itemsize = m->bf16 ? 2 : 4;
    const int64_t count = run->step->positions[row] + 1, each = run->scores_each / (m->heads / m->kv_heads);
    const int64_t stride = (int64_t)m->kv_heads * m->head * itemsize, skipped = (int64_t)kv_head * m->head * itemsize;
    const int64_t query_head = (int64_t)row * m->heads + kv_head * (m->heads / m->kv_heads) + first;
    const float *query = run->query + query_head * m->head;
    for (int64_t at = 0; at < count; at += m->block_tokens) {
        const char *keys = unit_at(run, row, at / m->block_tokens) + a->layer->keys * itemsize + skipped;
        int64_t stop = at + m->block_tokens < count ? at + m->block_tokens : count;
        for (int64_t position = at; position < stop; position++, keys += stride)
            score(query, keys, scores, each, position, group, m);
    }
    float factors[4];
    for (int g = 0; g < group; g++) factors[g] = soften(scores + g * each, count);
    for (int k = 0; k < m->head; k += 16 * vectors) {
        __m512 sums[4][4];
        for (int g = 0; g < group; g++)
            for (int v = 0; v < vectors; v++) sums[g][v] = _mm512_setzero_ps();
        for (int64_t at = 0; at < count; at += m->block_tokens) {
            const char *values = unit_at(run, row, at / m->block_tokens) + a->layer->values * itemsize + skipped;
            int64_t stop = at + m->block_tokens < count ? at + m->block_tokens : count;
            weigh(scores + at, each, values + k * itemsize, stride, sums, stop - at, group, vectors, m->bf16);
        }
        for (int g = 0; g < group; g++)
            for (int v = 0; v < vectors; v++) {
                __m512 mixed = rounded(_mm512_mul_ps(sums[g][v], _mm512_set1_ps(factors[g])), m->bf16);
                _mm512_storeu_ps(run->normed + (query_head + g) * m->head + k + 16 * v, mixed);
            }
    }
}

static void attend(void *context, int64_t from, int64_t to) {
    const attention_t *a = context;
    const model_t *m = a->run->model;
    const int group = m->heads / m->kv_heads, whole = m->head % 64 == 0;
    for (int64_t task = from; task < to; task++) {
        int row = (int)(task / m->kv_heads), kv_head = (int)(task % m->kv_heads);
        float *scores = a->run->scores + task * a->run->scores_each;
        for (int first = 0, some; first < group; first += some) {
            some = group - first >= 4 ? 4 : group - first;
            if (!whole) some = 1;
            switch (some * 2 + whole) {
            case 2: attend_some(a, row, kv_head, first, scores, 1, 1); break;
            case 3: attend_some(a, row, kv_head, first, scores, 1, 4); break;
            case 5: attend_some(a, row, kv_head, first, scores, 2, 4); break;
            case 7: attend_some(a, row, kv_head, first, scores, 3, 4); break;
            default: attend_some(a, row, kv_head, first, scores, 4, 4);
            }
        }
    }
}

static void run_layer(run_t *run, const layer_t *layer, int clears) {
    const model_t *m = run->model;
    const int64_t rows = run->step->rows;
    normalise(run->hidden, run->normed, layer->before_attention, rows, m->hidden, m);
    feed(run, run->normed, m->hidden, &layer->linear[QUERY]);
    changed_product(run, layer, QUERY, run->query);
    changed_product(run, layer, KEY, run->key);
    changed_product(run, layer, VALUE, run->value);
    if (layer->of_query) normalise(run->query, run->query, layer->of_query, rows * m->heads, m->head, m);
    if (layer->of_key) normalise(run->key, run->key, layer->of_key, rows * m->kv_heads, m->head, m);
    rotate(run, run->query, m->heads);
    rotate(run, run->key, m->kv_heads);
    cache(run, layer, clears);
    attention_t attention = {run, layer};
    shared_out(attend, &attention, rows * m->kv_heads, run->step->threads);
    feed(run, run->normed, m->heads * m->head, &layer->linear[OUTPUT]);
    changed_product(run, layer, OUTPUT, run->mixed);
    add(run->hidden, run->mixed, rows * m->hidden, m->bf16);
    normalise(run->hidden, run->normed, layer->before_mlp, rows, m->hidden, m);
    feed(run, run->normed, m->hidden, &layer->linear[GATE]);
    changed_product(run, layer, GATE, run->gate);
    changed_product(run, layer, UP, run->up);
    gate_up(run->gate, run->up, rows * m->inner, m->bf16);
    feed(run, run->gate, m->inner, &layer->linear[DOWN]);
    changed_product(run, layer, DOWN, run->mixed);
    add(run->hidden, run->mixed, rows * m->hidden, m->bf16);
}

void aegis_decode(const model_t *model, const step_t *step) {
    run_t run = {.model = model, .step = step};
    const int64_t rows = step->rows;
    int64_t positions = 0;
    for (int row = 0; row < rows; row++) positions = most(positions, step->positions[row] + 1);
    cut(&run, model, rows, positions, (char *)(((uintptr_t)step->scratch + 63) / 64 * 64));
    for (int row = 0; row < rows; row++)
        for (int k = 0; k < model->hidden; k += 16)
            _mm512_storeu_ps(run.hidden + (int64_t)row * model->hidden + k,
                             loaded(model->embedding, step->tokens[row] * model->hidden + k, model->bf16));
    find_angles(&run);
    for (int layer = 0; layer < model->layers; layer++) run_layer(&run, &model->layer[layer], layer == 0);
    normalise(run.hidden, run.normed, model->last_norm, rows, model->hidden, model);
    feed(&run, run.normed, model->hidden, &model->last);
    float *logits = model->bf16 ? run.mixed : step->logits;
    product(&run, &model->last, logits);
    for (int64_t at = 0; model->bf16 && at < rows * model->vocabulary; at++)
        ((uint16_t *)step->logits)[at] = (uint16_t)(((uint32_t *)logits)[at] >> 16);
}
