// Answers cpuid as a processor without AVX-512 and VNNI would, where hide_avx512.py has put ud2 in its place.
#define _GNU_SOURCE
#include <cpuid.h>
#include <signal.h>
#include <string.h>
#include <ucontext.h>

// Leaf 7: the foundations of AVX-512 and all that builds on them; VNNI and bfloat16 in both of their encodings.
static const unsigned EBX_7_0 = 1u << 16 | 1u << 17 | 1u << 21 | 1u << 28 | 1u << 30 | 1u << 31;
static const unsigned ECX_7_0 = 1u << 1 | 1u << 6 | 1u << 11 | 1u << 12 | 1u << 14;
static const unsigned EDX_7_0 = 1u << 2 | 1u << 3 | 1u << 8 | 1u << 22 | 1u << 23 | 1u << 24 | 1u << 25;
static const unsigned EAX_7_1 = 1u << 4 | 1u << 5 | 1u << 21 | 1u << 22 | 1u << 23;

static struct sigaction before;

static void answer(int number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *code = (const unsigned char *)registers[REG_RIP];
    if (code[0] != 0x0f || code[1] != 0x0b) {  // a real one
        sigaction(SIGILL, &before, NULL);
        return;
    }
    unsigned leaf = registers[REG_RAX], part = registers[REG_RCX], a, b, c, d;
    __cpuid_count(leaf, part, a, b, c, d);
    if (leaf == 7 && part == 0) b &= ~EBX_7_0, c &= ~ECX_7_0, d &= ~EDX_7_0;
    if (leaf == 7 && part == 1) a &= ~EAX_7_1, d = 0;
    registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
    registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void listen(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = answer;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGILL, &action, &before);
}
