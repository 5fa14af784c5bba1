// A stand-in for hipRTC: records the options that it is given, and hands the program's text back as its "code object".
//
// Knows:    hipRTC's C interface. A text with "#error" in it does not compile.
// Must not: compile: real compilers have tests of their own.

#include <string.h>

#include <string>

extern "C" void stand_in_note(const char* line);

struct Program {
    std::string text, log;
    bool compiled;
};
enum { HIPRTC_SUCCESS = 0, HIPRTC_ERROR_INVALID_PROGRAM = 4, HIPRTC_ERROR_COMPILATION = 6 };

extern "C" {
const char* hiprtcGetErrorString(int status) { return status ? "HIPRTC_ERROR" : "HIPRTC_SUCCESS"; }
int hiprtcVersion(int* major, int* minor) {
    *major = 9;
    *minor = 0;
    return HIPRTC_SUCCESS;
}
int hiprtcCreateProgram(Program** program, const char* text, const char*, int, const char**, const char**) {
    *program = new Program{text, "", false};
    return HIPRTC_SUCCESS;
}
int hiprtcDestroyProgram(Program** program) {
    delete *program;
    *program = nullptr;
    return HIPRTC_SUCCESS;
}
int hiprtcCompileProgram(Program* program, int count, const char** options) {
    std::string line = "hiprtcCompileProgram";
    for (int i = 0; i < count; ++i) line += std::string("\t") + options[i];
    stand_in_note(line.c_str());
    if (program->text.find("#error") != std::string::npos) {
        program->log = "error: planted\n";
        return HIPRTC_ERROR_COMPILATION;
    }
    program->compiled = true;
    return HIPRTC_SUCCESS;
}
int hiprtcGetProgramLogSize(const Program* program, size_t* size) {
    *size = program->log.size() + 1;
    return HIPRTC_SUCCESS;
}
int hiprtcGetProgramLog(const Program* program, char* log) {
    memcpy(log, program->log.c_str(), program->log.size() + 1);
    return HIPRTC_SUCCESS;
}
int hiprtcGetCodeSize(const Program* program, size_t* size) {
    *size = program->text.size() + 1;  // a zero behind it: hipModuleLoadData is told no size
    return program->compiled ? HIPRTC_SUCCESS : HIPRTC_ERROR_INVALID_PROGRAM;
}
int hiprtcGetCode(const Program* program, char* code) {
    memcpy(code, program->text.c_str(), program->text.size() + 1);
    return program->compiled ? HIPRTC_SUCCESS : HIPRTC_ERROR_INVALID_PROGRAM;
}
int hiprtcAddNameExpression(Program*, const char*) { return HIPRTC_SUCCESS; }
int hiprtcGetLoweredName(Program*, const char* name, const char** lowered) {
    *lowered = name;
    return HIPRTC_SUCCESS;
}
}
